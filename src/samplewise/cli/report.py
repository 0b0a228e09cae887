"""The demo's page: what was done, what was found, and the rows that look wrong."""

from collections.abc import Callable
from html import escape

from samplewise import __version__
from samplewise.cli.demo import NORM, Findings
from samplewise.cli.page import data_uri, document, paragraph, table
from samplewise.cli.plots import DARK, LIGHT, Theme, digit_image, norm_histogram, recall_plot
from samplewise.cli.results import cells, headings, in_words

TITLE = "Flipped labels, found by per-sample gradients"
NUM_SUSPECTS = 40
NUM_MISSED = 8
RECALL = "Recall of the flipped labels against training rows inspected: the steeper, the fewer rows a person must read."
NORMS = "Gradient norms of clean and flipped training rows; the axis is logarithmic."
LABELS = "Given is the label trained on, predicted what the trained model says, true what scikit-learn says."
CODE = """\
with sw.capture(model) as grads:
    losses = F.cross_entropy(model(x), y, reduction="none")
    grads.backward(losses)

grads.norms()                   # one gradient norm a row
-grads.dots(validation.sum())   # how hard a row pulls against the validation rows"""


def demo_page(found: Findings, *, seed: int, epochs: int, seconds: float) -> str:
    """The whole page as HTML."""
    k = found.digits.num_flipped
    order = list(enumerate(found.orders[NORM].tolist(), 1))
    missed = [(place, row) for place, row in order[k:] if found.digits.is_flipped[row]]
    sections = [
        paragraph(what_was_done(found, seed=seed, epochs=epochs)),
        "<h2>What was found</h2>",
        table(headings(k), [cells(name, quality) for name, quality in found.qualities.items()]),
        *(paragraph(remark) for remark in in_words(found)),
        f'<div class="plots">\n{picture(recall_plot, found, RECALL)}\n{picture(norm_histogram, found, NORMS)}\n</div>',
        f"<h2>The {NUM_SUSPECTS} most suspicious rows by gradient norm</h2>",
        paragraph(LABELS, soft=True),
        tiles(found, order[:NUM_SUSPECTS]),
        missed_section(found, missed),
        f"<h2>How</h2>\n<pre>{escape(CODE)}</pre>",
        f"<footer>samplewise {escape(__version__)} · training and ranking took {seconds:.1f} s</footer>",
    ]
    return document(TITLE, "\n".join(sections))


def what_was_done(found: Findings, *, seed: int, epochs: int) -> str:
    """Two sentences on the data, the model and the rankings."""
    digits = found.digits
    return (
        f"{digits.num_flipped} of {len(digits.x):,} training labels of scikit-learn's 8 × 8 digits were flipped to another "
        f"class, and a small CNN was trained on them (epochs: {epochs}, seed: {seed}), which is now right on "
        f"{found.accuracy:.1%} of {len(digits.test[1])} clean test rows. After every epoch the gradient of each training "
        "row was taken, and the rows were ranked by its norm, by how hard it pulls against the gradient of "
        f"{len(digits.validation[1])} clean validation rows, and for comparison by the loss, each averaged over the epochs."
    )


def picture(plot: Callable[[Findings, Theme], bytes], found: Findings, caption: str) -> str:
    """A plot drawn twice, for light and for dark pages, with its caption."""
    light, dark = (data_uri(plot(found, theme)) for theme in (LIGHT, DARK))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(caption)}"></picture><figcaption>{escape(caption)}</figcaption></figure>'
    )


def tiles(found: Findings, placed: list[tuple[int, int]]) -> str:
    """A grid of training images, from (place in the ranking, row)."""
    return f'<ul class="tiles">\n{"".join(tile(found, place, row) for place, row in placed)}</ul>'


def tile(found: Findings, place: int, row: int) -> str:
    """One training image: its place in the ranking, whether its label was flipped, and the three labels."""
    labels = {"given": found.digits.given[row], "predicted": found.predicted[row], "true": found.digits.true[row]}
    kind = "flipped" if found.digits.is_flipped[row] else "clean"
    return (
        f'<li class="{kind}"><div class="top"><span class="soft">#{place}</span><span class="mark">{kind}</span></div>'
        f'<img src="{data_uri(digit_image(found.digits.x[row]))}" alt="training row {row}">'
        f"<dl>{''.join(f'<dt>{name}</dt><dd>{int(label)}</dd>' for name, label in labels.items())}</dl></li>\n"
    )


def missed_section(found: Findings, missed: list[tuple[int, int]]) -> str:
    """The flipped rows that stand lowest in the ranking, or nothing if all of them stand in the top."""
    if not missed:
        return ""
    k, shown = found.digits.num_flipped, missed[-NUM_MISSED:]
    which = "all of them" if len(shown) == len(missed) else f"the {len(shown)} that stand lowest"
    about = f"Flipped rows outside the top {k} by gradient norm: {len(missed)}. Shown: {which}."
    return f"<h2>Missed</h2>\n{paragraph(about, soft=True)}\n{tiles(found, shown)}"
