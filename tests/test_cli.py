"""The command line: its names and flags, the demo from end to end, and the functions that score a ranking."""

import base64
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer
from sklearn.metrics import average_precision_score
from typer.testing import CliRunner, Result

import samplewise
from samplewise.cli import main
from samplewise.cli.demo import (
    AGAINST,
    CHANCE,
    LOSS,
    NORM,
    Findings,
    findings,
    flip_labels,
    flipped_digits,
    small_cnn,
    suspicion,
    training,
)
from samplewise.cli.page import paragraph, table
from samplewise.cli.ranking import average_precision, chance, quality, ranked, recall_curve
from samplewise.cli.report import NUM_MISSED, NUM_SUSPECTS, tile
from samplewise.cli.results import cells, headings, in_words

SEED, EPOCHS, FLIPPED = 3, 2, 0.1


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The demo, run small from the command line, and the page it wrote."""
    output = tmp_path_factory.mktemp("demo") / "new" / "page.html"
    flags = ["--flipped", FLIPPED, "--seed", SEED, "--epochs", EPOCHS, "--output", output]
    result = CliRunner().invoke(main.app, ["demo", *map(str, flags)], env={"COLUMNS": "200"}, catch_exceptions=False)
    return result, output


@pytest.fixture(scope="module")
def found() -> Findings:
    """The same job, run from Python."""
    generator = seeded(SEED)
    digits = flipped_digits(fraction=FLIPPED, generator=generator)
    model = small_cnn(seed=SEED)
    return findings(model, digits, list(training(model, digits, epochs=EPOCHS, generator=generator)))


class Page(HTMLParser):
    """The tags, addresses and texts of a page; raises where a tag is not closed."""

    VOID = ("meta", "img", "source")

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "action")]
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# --- the app ---------------------------------------------------------------------------------------------------------


def test_commands_and_flags_are_frozen():
    group = typer.main.get_command(main.app)
    flags = lambda command: {flag for parameter in command.params for flag in parameter.opts}
    assert flags(group) == {"--version"}
    assert {name: flags(command) for name, command in group.commands.items()} == {
        "demo": {"--flipped", "--seed", "--epochs", "--output"},
        "audit": {
            "--epsilon",
            "--delta",
            "--canaries",
            "--black-box",
            "--steps",
            "--batch-size",
            "--confidence",
            "--broken",
            "--seed",
            "--output",
        },
        "check": {"factory", "--input", "--batch-dim", "--batch-size", "--dtype", "--seed", "--train"},
    }


def test_version():
    result = CliRunner().invoke(main.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"samplewise {samplewise.__version__}\n")


@pytest.mark.parametrize("flags", [["--flipped", "0.9"], ["--flipped", "0"], ["--epochs", "0"], ["--output", "."]])
def test_demo_refuses_what_makes_no_sense(flags):
    assert CliRunner().invoke(main.app, ["demo", *flags]).exit_code == 2


@pytest.mark.parametrize(("module", "package"), [("typer", "typer"), ("sklearn", "scikit-learn")])
def test_missing_packages_are_named_with_the_way_out(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    app = runpy.run_path(main.__file__)["app"]
    with pytest.raises(SystemExit, match=rf"needs {package}\. .*pip install 'samplewise\[cli\]'") as stopped:
        app()
    assert isinstance(stopped.value.code, str)  # the interpreter prints it to stderr and exits with 1


def test_library_does_not_import_the_extra():
    code = "import sys, samplewise; print(sorted({'typer', 'rich', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- the demo, from end to end ---------------------------------------------------------------------------------------


def test_console_prints_what_was_found(ran, found):
    result, output = ran
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if line.startswith("│")]
    assert rows == [cells(*row) for row in found.qualities.items()]
    assert [row[0] for row in rows] == [NORM, AGAINST, LOSS, CHANCE]
    assert all(heading in result.output for heading in headings(140))
    printed = " ".join(result.output.split())
    assert all(remark in printed for remark in in_words(found))
    assert str(output) in result.output
    assert "Took " in result.output


def test_page_stands_alone(ran):
    _, output = ran
    html = output.read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "http" not in html
    assert "url(" not in html
    assert "@import" not in html
    for address in page.addresses:
        kind, data = address.split(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")


def test_page_shows_what_was_found(ran, found):
    _, output = ran
    page = Page(output.read_text(encoding="utf-8"))
    num_missed = int(found.digits.is_flipped[found.orders[NORM][found.digits.num_flipped :]].sum())
    assert page.tags.count("source") == 2
    assert page.tags.count("img") == 2 + NUM_SUSPECTS + min(num_missed, NUM_MISSED)
    shown = found.digits.is_flipped[found.orders[NORM][:NUM_SUSPECTS]].sum() + min(num_missed, NUM_MISSED)
    assert page.texts.count("flipped") == shown
    for row in found.qualities.items():
        assert all(cell in page.texts for cell in cells(*row))
    assert all(remark in page.texts for remark in in_words(found))


def test_tile_tells_the_truth(found):
    row = int(found.orders[NORM][0])
    texts = Page(tile(found, 1, row)).texts
    labels = [found.digits.given[row], found.predicted[row], found.digits.true[row]]
    assert [text for text in texts if text.isdigit()] == [str(int(label)) for label in labels]
    assert ("flipped" in texts) == (labels[0] != labels[2])


def test_page_escapes_text():
    assert "<td>a &lt;b&gt; &amp; c</td>" in table(["x"], [["a <b> & c"]])
    assert paragraph("1 < 2") == "<p>1 &lt; 2</p>"


# --- the job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "count"), [(0.05, 10), (0.333, 67), (0.0, 1)])
def test_flips_are_exact_and_never_to_the_same_label(fraction, count):
    labels = torch.arange(200) % 10
    given, is_flipped = flip_labels(labels, fraction=fraction, generator=seeded(0))
    assert is_flipped.sum() == count
    assert torch.equal(given != labels, is_flipped)
    assert given.min() >= 0
    assert given.max() <= 9
    assert torch.equal(labels, torch.arange(200) % 10)


def test_flips_follow_the_seed():
    labels = torch.arange(200) % 10
    first, again, other = (flip_labels(labels, fraction=0.2, generator=seeded(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_flips_reach_every_other_class():
    given, is_flipped = flip_labels(torch.zeros(2000, dtype=torch.long), fraction=0.5, generator=seeded(0))
    assert given[is_flipped].unique().tolist() == list(range(1, 10))


def test_held_out_labels_are_clean_and_rows_are_split():
    digits = flipped_digits(fraction=0.5, generator=seeded(0))
    parts = [(digits.x, digits.true), digits.validation, digits.test]
    assert [len(y) for _, y in parts] == [1397, 200, 200]
    rows = {(*x.flatten().tolist(), int(y)) for xs, ys in parts for x, y in zip(xs, ys, strict=True)}
    clean = flipped_digits(fraction=0.01, generator=seeded(0))
    assert len(rows) == 1797
    assert torch.equal(digits.validation[1], clean.validation[1])
    assert torch.equal(digits.test[1], clean.test[1])


def test_the_model_leaves_the_global_seed_alone():
    state = torch.get_rng_state()
    first, second = small_cnn(seed=1), small_cnn(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_suspicion_is_what_a_loop_over_rows_gives():
    digits, model = flipped_digits(fraction=0.1, generator=seeded(0)), small_cnn(seed=0)
    scores = suspicion(model, digits)
    gradient = lambda x, y: torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))
    flat = lambda grads: torch.cat([grad.flatten() for grad in grads]).double()
    v = flat(gradient(*digits.validation))
    for row in (0, 700, 1396):
        g = flat(gradient(digits.x[row : row + 1], digits.given[row : row + 1]))
        # float32 sums over 10 thousand parameters: 1e-4 of the size of what is summed
        assert scores[NORM][row].item() == pytest.approx(g.norm().item(), rel=1e-4)
        assert scores[AGAINST][row].item() == pytest.approx(-(v @ g).item(), abs=1e-4 * (v.norm() * g.norm()).item())


def test_scores_are_means_over_epochs(found):
    generator = seeded(SEED)
    digits = flipped_digits(fraction=FLIPPED, generator=generator)
    history = list(training(small_cnn(seed=SEED), digits, epochs=EPOCHS, generator=generator))
    assert [epoch.number for epoch in history] == [1, 2]
    for name, score in found.scores.items():
        torch.testing.assert_close(score, (history[0].scores[name] + history[1].scores[name]) / 2)


# --- ranking ---------------------------------------------------------------------------------------------------------

# wanted rows 1, 3, 4 of six stand at places 1, 3 and 6
SCORES = torch.tensor([0.5, 0.9, 0.4, 0.1, 0.45, 0.2])
IS_WANTED = torch.tensor([False, True, False, True, True, False])


def test_ranking_by_hand():
    order = ranked(SCORES)
    assert order.tolist() == [1, 0, 4, 2, 5, 3]
    assert recall_curve(order, IS_WANTED).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1])
    assert average_precision(order, IS_WANTED) == pytest.approx((1 / 1 + 2 / 3 + 3 / 6) / 3)
    by_hand = quality(order, IS_WANTED)
    assert (by_hand.num_rows, by_hand.num_wanted, by_hand.found, by_hand.rows_to_read) == (6, 3, 2, 6)
    assert by_hand.recall == pytest.approx(2 / 3)


def test_average_precision_matches_scikit_learn():
    scores, is_wanted = torch.rand(300, generator=seeded(0)), torch.rand(300, generator=seeded(1)) < 0.2
    expected = average_precision_score(is_wanted.numpy(), scores.numpy())
    assert average_precision(ranked(scores), is_wanted) == pytest.approx(expected)


def test_perfect_and_worst_rankings():
    best, worst = quality(ranked(IS_WANTED.float()), IS_WANTED), quality(ranked(-IS_WANTED.float()), IS_WANTED)
    assert (best.found, best.recall, best.average_precision, best.rows_to_read) == (3, 1, 1, 3)
    assert (worst.found, worst.recall, worst.rows_to_read) == (0, 0, 6)
    assert worst.average_precision == pytest.approx((1 / 4 + 2 / 5 + 3 / 6) / 3)


@pytest.mark.parametrize("field", ["found", "average_precision", "rows_to_read"])
def test_random_rankings_score_chance(field):
    is_wanted, generator = torch.arange(400) < 40, seeded(0)
    drawn = [getattr(quality(torch.randperm(400, generator=generator), is_wanted), field) for _ in range(500)]
    drawn = torch.tensor(drawn, dtype=torch.float64)
    # four standard errors of the mean of the draws
    assert drawn.mean().item() == pytest.approx(getattr(chance(400, 40), field), abs=4 * drawn.std().item() / 500**0.5)


def test_chance_where_every_row_is_wanted():
    certain = chance(5, 5)
    assert (certain.found, certain.recall, certain.rows_to_read) == (5, 1, 5)
    assert certain.average_precision == pytest.approx(1)
