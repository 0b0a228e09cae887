"""The demo's page: one HTML file that holds its style, plots and images, and asks nothing of the network."""

from base64 import b64encode
from collections.abc import Callable, Iterable
from html import escape

from samplewise import __version__
from samplewise.cli.demo import NORM, Findings, in_words
from samplewise.cli.plots import DARK, LIGHT, Theme, digit_image, norm_histogram, recall_plot
from samplewise.cli.ranking import Quality

TITLE = "Flipped labels, found by per-sample gradients"
NUM_TILES = 40
NUM_MISSED = 10
HEADINGS = ("ranking", "flipped in the top {k}", "precision = recall", "average precision", "rows to read for 90 %")

CODE = """\
with sw.capture(model) as grads:
    losses = F.cross_entropy(model(x), y, reduction="none")
    grads.backward(losses)

grads.norms()                   # one gradient norm a row
-grads.dots(validation.sum())   # how hard a row pulls against the validation rows"""

STYLE = """\
:root { color-scheme: light dark; --page: #fbfbfd; --card: #fff; --ink: #1f2430; --soft: #5b6475; --line: #e3e6ec;
  --flipped: #c2410c; --flipped-bg: #fff1e7; --clean: #475569; --clean-bg: #eef1f6; }
@media (prefers-color-scheme: dark) { :root { --page: #14171d; --card: #1c2028; --ink: #e6e8ee; --soft: #9aa3b5;
  --line: #313744; --flipped: #fb923c; --flipped-bg: #3a2415; --clean: #a9b4c6; --clean-bg: #2a303c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { margin: 0 0 .6rem; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 2.6rem 0 .5rem; font-size: 1.2rem; }
p { max-width: 46rem; margin: .5rem 0; }
.soft, figcaption, footer { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem 1.1rem .45rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th { font-size: .85rem; font-weight: 600; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-right: 2rem; }
tbody tr:last-child td { color: var(--soft); }
pre { overflow-x: auto; padding: .9rem 1.1rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card);
  font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.25rem; }
figure { margin: 0; padding: 1rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card); }
figure img { display: block; width: 100%; height: auto; }
figcaption { margin-top: .5rem; font-size: .875rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.4rem, 1fr)); gap: .75rem; padding: 0;
  margin: 1rem 0; list-style: none; }
.tiles li { padding: .6rem; border: 1px solid var(--line); border-radius: .6rem; background: var(--card); }
.tiles img { display: block; width: 100%; aspect-ratio: 1; border-radius: .3rem; image-rendering: pixelated; }
.top { display: flex; justify-content: space-between; align-items: center; margin-bottom: .45rem; font-size: .8rem; }
.mark { padding: 0 .5em; border-radius: 1em; font-weight: 600; color: var(--clean); background: var(--clean-bg); }
.flipped .mark { color: var(--flipped); background: var(--flipped-bg); }
dl { display: grid; grid-template-columns: 1fr auto; margin: .45rem 0 0; font-size: .85rem; line-height: 1.4; }
dt { color: var(--soft); }
dd { margin: 0; font-weight: 600; text-align: right; }
footer { margin-top: 3rem; font-size: .85rem; }"""


def page(found: Findings, *, seed: int, epochs: int, seconds: float) -> str:
    """The whole page as HTML."""
    k, N = int(found.digits.is_flipped.sum()), len(found.digits.x)
    order = found.orders[NORM].tolist()
    places = {row: place for place, row in enumerate(order, 1)}
    missed = [row for row in order[k:] if found.digits.is_flipped[row]]
    held = len(found.digits.validation[1]), len(found.digits.test[1])
    body = f"""\
<h1>{escape(TITLE)}</h1>
<p>{k} of {N:,} training labels of scikit-learn's 8 × 8 digits were flipped to another class, and a small CNN was trained on
them for {epochs} epochs (seed {seed}; {found.accuracy:.1%} right on {
        held[1]
    } clean test rows). After every epoch the gradient
of each training row was taken, and the rows are ranked by what it says, averaged over the epochs.</p>

<h2>What was found</h2>
<div class="scroll">{results_table(found.qualities)}</div>
{"".join(f"<p>{escape(sentence)}</p>" for sentence in in_words(found))}
<p class="soft">The ranking against validation is given {held[0]} rows with clean labels; the other rankings see none.</p>

<div class="plots">
{
        picture(
            recall_plot,
            found,
            "Recall of the flipped labels against training rows inspected: the steeper, the fewer rows a person must read.",
        )
    }
{picture(norm_histogram, found, "Gradient norms of clean and flipped training rows. Both axes are logarithmic.")}
</div>

<h2>The {min(NUM_TILES, N)} most suspicious rows by gradient norm</h2>
<p class="soft">Given is the label trained on, predicted what the trained model says, true what scikit-learn says.</p>
{tiles(found, order[:NUM_TILES], places)}
{missed_rows(found, missed, places)}
<h2>How</h2>
<pre>{escape(CODE)}</pre>
<footer>samplewise {escape(__version__)} · {seconds:.1f} s on this machine · samplewise demo</footer>"""
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(TITLE)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def cells(name: str, quality: Quality) -> tuple[str, ...]:
    """The row of the results table that belongs to one ranking, as on the console and on the page."""
    found = f"{quality.found:.0f}" if quality.found == int(quality.found) else f"{quality.found:.1f}"
    return name, found, f"{quality.recall:.1%}", f"{quality.average_precision:.3f}", f"{quality.rows_to_read:.0f}"


def headings(num_flipped: int) -> list[str]:
    """The column names of the results table."""
    return [heading.format(k=num_flipped) for heading in HEADINGS]


def results_table(qualities: dict[str, Quality]) -> str:
    """The table of results, a row a ranking; chance is the last."""
    head = "".join(
        f'<th scope="col">{escape(heading)}</th>' for heading in headings(next(iter(qualities.values())).num_wanted)
    )
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(name, quality))}</tr>\n"
        for name, quality in qualities.items()
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>"


def picture(plot: Callable[[Findings, Theme], bytes], found: Findings, caption: str) -> str:
    """A plot drawn twice, for light and for dark pages, with its caption."""
    light, dark = (data_uri(plot(found, theme)) for theme in (LIGHT, DARK))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(caption)}"></picture><figcaption>{escape(caption)}</figcaption></figure>'
    )


def tiles(found: Findings, rows: Iterable[int], places: dict[int, int]) -> str:
    """A grid of training images with their labels."""
    return f'<ul class="tiles">\n{"".join(tile(found, row, places[row]) for row in rows)}</ul>'


def tile(found: Findings, row: int, place: int) -> str:
    """One training image: its place in the ranking, whether its label was flipped, and the three labels."""
    labels = {"given": found.digits.given[row], "predicted": found.predicted[row], "true": found.digits.true[row]}
    kind = "flipped" if found.digits.is_flipped[row] else "clean"
    return (
        f'<li class="{kind}"><div class="top"><span class="soft">#{place}</span><span class="mark">{kind}</span></div>'
        f'<img src="{data_uri(digit_image(found.digits.x[row]))}" alt="training row {row}">'
        f"<dl>{''.join(f'<dt>{name}</dt><dd>{int(label)}</dd>' for name, label in labels.items())}</dl></li>\n"
    )


def missed_rows(found: Findings, missed: list[int], places: dict[int, int]) -> str:
    """The section of the flipped rows that stand lowest in the ranking, or nothing if all stand in the top."""
    if not missed:
        return ""
    k = int(found.digits.is_flipped.sum())
    shown = missed[-NUM_MISSED:]
    which = "all of them" if len(shown) == len(missed) else f"the {len(shown)} that stand lowest"
    return (
        f'<h2>Missed</h2>\n<p class="soft">Flipped rows outside the top {k} by gradient norm: {len(missed)}. '
        f"Shown: {which}.</p>\n{tiles(found, shown, places)}"
    )


def data_uri(png: bytes) -> str:
    """A PNG as an address that carries it."""
    return f"data:image/png;base64,{b64encode(png).decode()}"
