"""The audit: its bound against exact sums, its verdicts on trainings that keep and break their claim, and its command."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import samplewise as sw
from samplewise.cli import main
from samplewise.cli.audit import audited_digits
from samplewise.dp import accounting
from samplewise.dp.auditing import NOBODY, ROW, GradientCanaries, audit, epsilon_lower_bound, guesses, p_value
from samplewise.testing import oracle

SMALL = [(m, r) for m in (1, 2, 5, 8) for r in range(m + 1)]
EPSILONS, DELTAS = (0.0, 0.3, 1.0, 4.0), (0.0, 1e-5, 0.01, 0.2)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def accuracy(epsilon: float) -> float:
    """How often randomized response tells the truth."""
    return 1 / (1 + math.exp(-epsilon))


def tail(probabilities: list[Fraction], v: int) -> Fraction:
    return sum(probabilities[v:], Fraction(0))


def binomial(r: int, q: Fraction) -> list[Fraction]:
    """P[W = k] for k = 0 ... r by going through all 2^r ways to be right and wrong."""
    found = [Fraction(0)] * (r + 1)
    for ways in itertools.product((0, 1), repeat=r):
        found[sum(ways)] += q ** sum(ways) * (1 - q) ** (r - sum(ways))
    return found


# --- the bound ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_p_value_is_the_formula_in_exact_numbers(epsilon, delta):
    for m, r in SMALL:
        W = binomial(r, Fraction(accuracy(epsilon)))
        for v in range(r + 1):
            alpha = max((sum(W[v - i : v]) / i for i in range(1, v + 1)), default=Fraction(0))
            exact = min(Fraction(1), tail(W, v) + 2 * m * Fraction(delta) * alpha)
            found = p_value(num_canaries=m, num_guesses=r, num_correct=v, epsilon=epsilon, delta=delta)
            assert found == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_no_private_mechanism_beats_the_p_value(epsilon, delta):
    """Two that are (epsilon, delta)-private for each coin: one tells each coin with probability delta, one tells all or none."""
    q, d = Fraction(accuracy(epsilon)), Fraction(delta)
    for m in (1, 2, 5, 8):
        each, response = binomial(m, d + (1 - d) * q), binomial(m, q)
        for v in range(m + 1):
            bound = p_value(num_canaries=m, num_guesses=m, num_correct=v, epsilon=epsilon, delta=delta)
            assert float(tail(each, v)) <= bound + 1e-12
            assert float(d + (1 - d) * tail(response, v)) <= bound + 1e-12


@pytest.mark.parametrize(("r", "epsilon"), [(100_000, 0.5), (1000, 3.0), (1000, 12.0), (40, 0.0)])
def test_p_value_of_many_guesses_matches_scipy(r, epsilon):
    for v in (r // 2, int(r * accuracy(epsilon)), min(r, int(r * accuracy(epsilon) + r**0.5))):
        found = p_value(num_canaries=r, num_guesses=r, num_correct=v, epsilon=epsilon, delta=0.0)
        # log-gamma of 1e5 is 1e6, whose last bit is 1e-10
        assert found == pytest.approx(scipy.stats.binom.sf(v - 1, r, accuracy(epsilon)), rel=1e-8, abs=1e-300)


def test_bounds_printed_in_the_paper():
    """Appendix D prints 0.673, section 7 prints 2.675 for what is 2.67585: one in the last digit is allowed."""
    found = epsilon_lower_bound(num_canaries=1000, num_guesses=100, num_correct=75, delta=1e-4, confidence=0.95)
    assert found == pytest.approx(0.673, abs=5e-4)
    found = epsilon_lower_bound(num_canaries=100_000, num_guesses=1510, num_correct=1439, delta=1e-5, confidence=0.95)
    assert found == pytest.approx(2.675, abs=1e-3)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.002, 0.05, 0.5])
@pytest.mark.parametrize("confidence", [0.51, 0.95, 0.999])
def test_everything_below_the_bound_is_refuted_and_nothing_above(delta, confidence):
    """Also where 2 m delta > 1 and the p-value is not monotone."""
    for r, v in [(30, 30), (30, 27), (30, 18), (30, 15), (30, 3), (30, 0), (0, 0), (1, 1)]:
        known = {"num_canaries": 40, "num_guesses": r, "num_correct": v, "delta": delta}
        bound = epsilon_lower_bound(**known, confidence=confidence)
        for epsilon in torch.linspace(0, 12, 100).tolist():
            assert (p_value(**known, epsilon=epsilon) < 1 - confidence) == (epsilon <= bound and bound > 0)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 5.0])
def test_a_tight_mechanism_is_refuted_as_seldom_as_promised(epsilon):
    """Exact: the chances of all numbers of right guesses of randomized response that refute it sum to 5% at most."""
    W = scipy.stats.binom(80, accuracy(epsilon))
    bounds = [epsilon_lower_bound(num_canaries=80, num_guesses=80, num_correct=v, delta=0.0) for v in range(81)]
    refuting = sum(W.pmf(v) for v, bound in enumerate(bounds) if bound > epsilon)
    assert 0.005 < refuting <= 0.05 or (1 - accuracy(epsilon)) * 80 < 1  # near all right is the best there is


def test_perfect_guesses_of_a_few_canaries_say_little():
    few, many = (epsilon_lower_bound(num_canaries=m, num_guesses=m, num_correct=m, delta=0.0) for m in (10, 1000))
    assert few == pytest.approx(-math.log(0.05 ** (-1 / 10) - 1), abs=1e-6)
    assert many == pytest.approx(-math.log(0.05 ** (-1 / 1000) - 1), abs=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"num_correct": 6}, {"num_guesses": 11}, {"num_correct": -1}, {"delta": -0.1}, {"delta": math.nan}]
)
def test_bound_refuses_what_cannot_be(wrong):
    right = {"num_canaries": 10, "num_guesses": 5, "num_correct": 5, "delta": 0.0}
    with pytest.raises(ValueError, match=r"no more right|delta a probability"):
        epsilon_lower_bound(**(right | wrong))
    with pytest.raises(ValueError, match="confidence lies between"):
        epsilon_lower_bound(**right, confidence=0.5)
    with pytest.raises(ValueError, match="epsilon is finite"):
        p_value(**right, epsilon=math.inf)


# --- the audit ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", [0, 1, 2, 5, 6, 7])
def test_guesses_are_so_many_and_at_the_ends(r):
    scores = torch.tensor([0.2, -3.0, 1.0, math.inf, 0.0, -0.5, 0.3])
    guessed = guesses(scores, num_guesses=r)
    assert guessed.abs().sum() == r
    assert guessed.sum() == r % 2
    by_score = guessed[scores.argsort()].tolist()
    assert by_score == sorted(by_score)


def test_the_best_of_many_numbers_of_guesses_keeps_the_confidence():
    """Randomized response, told apart at random among equals: of 100 audits at 90% at most 20 may (10 + 3.3 σ;
    fails one time in 1,000 at the edge of the promise, and the numbers are the same every time) refute it."""
    generator = seeded(0)

    def respond(is_in: Tensor) -> Tensor:
        is_true = torch.rand(len(is_in), generator=generator) < accuracy(1.0)
        return (is_in == is_true).double() + 0.1 * torch.rand(len(is_in), generator=generator)

    run = lambda seed: audit(
        respond, num_canaries=64, epsilon=1.0, delta=0.0, confidence=0.9, generator=seeded(10_000 + seed)
    )
    results = [run(seed) for seed in range(100)]
    assert all([row.num_guesses for row in result.rows] == [64, 32, 16, 8, 4] for result in results)
    assert sum(result.is_refuted for result in results) <= 20


def test_each_bound_is_at_its_share_of_the_level():
    result = audit(
        lambda is_in: is_in.float(), num_canaries=100, epsilon=2.5, delta=1e-5, num_guesses=[100, 50], generator=seeded(1)
    )
    for row in result.rows:
        alone = {"num_guesses": row.num_guesses, "num_correct": row.num_correct}
        assert row.lower_bound == epsilon_lower_bound(num_canaries=100, **alone, delta=1e-5, confidence=0.975)
    assert result.best.lower_bound == max(row.lower_bound for row in result.rows)
    assert result.is_refuted


def test_inverted_scores_show_nothing():
    result = audit(lambda is_in: -is_in.float(), num_canaries=100, epsilon=1.0, delta=0.0, generator=seeded(0))
    assert result.best.lower_bound == 0.0


def test_coins_follow_the_generator_and_are_fair():
    seen = []
    note = lambda is_in: seen.append(is_in) or torch.zeros(len(is_in))
    for generator in (seeded(3), seeded(3), None, None):
        audit(note, num_canaries=1000, epsilon=1.0, delta=0.0, generator=generator)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[2], seen[3])
    assert all(421 < coins.sum() < 579 for coins in seen)  # 5 σ: one run in 400,000 fails for each


def test_what_the_training_does_to_the_coins_does_not_matter():
    def spoil(is_in: Tensor) -> Tensor:
        is_in[:] = True
        return torch.arange(100.0)

    result = audit(spoil, num_canaries=100, epsilon=1.0, delta=0.0, num_guesses=[100], generator=seeded(0))
    assert 30 < result.best.num_correct < 70


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_canaries": 0}, r"guesses number 1 to 0, as there are 0 canaries, got \[1\]"),
        ({"num_guesses": []}, "guesses number 1 to 20"),
        ({"num_guesses": [21]}, r"guesses number 1 to 20, as there are 20 canaries, got \[21\]"),
        (
            {"epsilon": 1.7},
            "all right refute an epsilon of 1.35 with 20 canaries, so 1.7 would stand whatever the training does",
        ),
        ({"epsilon": math.inf}, "inf would stand"),
        ({"epsilon": -1.0}, "-1.0 would stand"),
        ({"epsilon": math.nan}, "nan would stand"),
        ({"delta": 2.0}, "delta"),
        ({"confidence": 0.2}, "confidence"),
    ],
)
def test_audit_refuses_before_the_training(wrong, message):
    never = lambda is_in: pytest.fail("trained")
    with pytest.raises(ValueError, match=message):
        audit(never, **({"num_canaries": 20, "epsilon": 1.0, "delta": 0.0} | wrong))


@pytest.mark.parametrize("scores", [torch.zeros(19), torch.zeros(20, 1), torch.full((20,), math.nan)])
def test_audit_refuses_scores_that_are_none(scores):
    with pytest.raises(ValueError, match=r"must return a number for each, shape \[20\]"):
        audit(lambda is_in: scores, num_canaries=20, epsilon=1.0, delta=0.0)


# --- canaries ----------------------------------------------------------------------------------------------------------------


def cross_entropies(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.fixture
def losses() -> GradientCanaries:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(108, 10)).double()
    model[0].bias.requires_grad_(False)
    return GradientCanaries(model, cross_entropies, length=1000.0)


def test_canaries_have_one_coordinate_and_rows_their_gradient(losses):
    num_weights = len(losses.weights())
    assert num_weights == 27 + 6 + 1090
    coordinates = torch.tensor([ROW, NOBODY, 0, 30, num_weights - 1])
    x, y = torch.randn(5, 1, 8, 8, dtype=torch.float64), torch.arange(5)
    with sw.capture(losses) as grads:
        grads.backward(losses(coordinates, x, y))
    G = torch.cat([g.flatten(1) for g in grads.materialize().values()], 1)
    expected = torch.zeros(5, num_weights, dtype=torch.float64)
    alone = oracle(losses.model, cross_entropies, x[:1], y[:1])
    expected[0] = torch.cat([alone[name].flatten() for name, p in losses.model.named_parameters() if p.requires_grad])
    for row in (2, 3, 4):
        expected[row, coordinates[row]] = 1000.0
    torch.testing.assert_close(G, expected)
    clipped = torch.cat([g.flatten() for g in grads.clipped_sum(max_norm=1.0).values()])
    torch.testing.assert_close(clipped - expected[0] / expected[0].norm(), expected[2:].sum(0) / 1000)


def test_coordinates_are_distinct_and_all_over_the_model(losses):
    drawn = losses.draw(1000, generator=seeded(0))
    assert len(drawn.unique()) == 1000
    assert drawn.min() < 27
    assert drawn.max() >= 33
    assert torch.equal(drawn, losses.draw(1000, generator=seeded(0)))
    with pytest.raises(ValueError, match="1124 canaries need a coordinate each, but the model has 1123"):
        losses.draw(1124, generator=seeded(0))


# --- private training, audited -------------------------------------------------------------------------------------------------

SMALL_AUDIT = {
    "epsilon": 3.0,
    "delta": 1e-5,
    "num_canaries": 600,
    "steps": 10,
    "batch_size": 1000,
    "confidence": 0.95,
    "seed": 0,
}
Z = 2.49


@pytest.fixture
def _noise_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the noise takes longer than the training."""
    monkeypatch.setattr("samplewise.cli.audit.noise_multiplier_for", lambda **targets: Z)


def test_the_known_noise_is_what_the_claim_needs():
    costs = [accounting.epsilon([accounting.Steps(z, 1000 / (1397 + 600), 10)], delta=1e-5) for z in (Z, 0.99 * Z)]
    assert costs[0] <= 3.0 < costs[1]


@pytest.mark.usefixtures("_noise_is_known")
def test_private_training_keeps_its_claim_as_far_as_the_audit_sees():
    """A training that keeps its claim fails this with probability 5% at most over seeds; the seed is fixed."""
    result = audited_digits(**SMALL_AUDIT, black_box=False, noise_factor=1.0)
    assert 0.2 < result.best.lower_bound < 3.0  # above 0: the canaries are seen at all


@pytest.mark.usefixtures("_noise_is_known")
def test_a_tenth_of_the_noise_is_caught():
    result = audited_digits(**SMALL_AUDIT, black_box=False, noise_factor=0.1)
    assert result.is_refuted
    assert result.best.num_correct / result.best.num_guesses > 0.98


@pytest.mark.usefixtures("_noise_is_known")
def test_input_canaries_bound_from_below_too():
    result = audited_digits(**SMALL_AUDIT, black_box=True, noise_factor=1.0)
    assert 0 <= result.best.lower_bound < 3.0


# --- the command ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_noise_is_known")
@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--broken"], 1)])
def test_command_prints_and_writes_what_was_found(tmp_path: Path, flags, status):
    output = tmp_path / "new" / "audit.json"
    known = ["--canaries", "600", "--steps", "10", "--batch-size", "1000", "--output", str(output)]
    result = CliRunner().invoke(main.app, ["audit", *known, *flags], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == status
    found = json.loads(output.read_text())
    assert (found["epsilon"], found["delta"], found["confidence"], found["num_canaries"]) == (3.0, 1e-5, 0.95, 600)
    assert (found["is_refuted"], found["is_broken"], found["black_box"]) == (status == 1, status == 1, False)
    assert found["lower_bound"] == max(row["lower_bound"] for row in found["rows"])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if line.startswith("│")]
    assert [[row["num_guesses"], row["num_correct"]] for row in found["rows"]] == [
        [int(cell) for cell in row[:2]] for row in rows
    ]
    assert [f"{row['lower_bound']:.2f}" for row in found["rows"]] == [row[3] for row in rows]
    shown = f"{'refuted' if status else 'not refuted'}: epsilon is over {found['lower_bound']:.2f} (delta 1e-05), and 3 is claimed"
    assert f"\n{shown}" in result.output


@pytest.mark.usefixtures("_noise_is_known")
@pytest.mark.parametrize(
    "flags",
    [
        ["--epsilon", "0"],
        ["--confidence", "0.4"],
        ["--canaries", "1"],
        ["--canaries", "10"],  # too few to refute an epsilon of 3
        ["--canaries", "20000"],  # more than the model has parameters
        ["--steps", "0"],
    ],
)
def test_command_refuses_what_makes_no_sense(flags):
    assert CliRunner().invoke(main.app, ["audit", *flags]).exit_code == 2
