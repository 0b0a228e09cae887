"""What was found, in figures and in words: the same on the console and on the page."""

from samplewise.cli.demo import AGAINST, CHANCE, LOSS, NORM, Findings
from samplewise.cli.ranking import Quality


def headings(num_flipped: int) -> list[str]:
    """The column names of the results table."""
    return [
        "ranking",
        f"flipped in the top {num_flipped}",
        "precision = recall",
        "average precision",
        "rows to read for 90%",
    ]


def cells(name: str, quality: Quality) -> list[str]:
    """The row of the results table that belongs to one ranking."""
    found = f"{quality.found:.1f}" if name == CHANCE else f"{quality.found:.0f}"
    return [name, found, f"{quality.recall:.1%}", f"{quality.average_precision:.3f}", f"{quality.rows_to_read:.0f}"]


def in_words(found: Findings) -> list[str]:
    """What was seen, in two remarks that hold whatever the numbers are."""
    by_norm, against, by_loss, by_chance = (found.qualities[name] for name in (NORM, AGAINST, LOSS, CHANCE))
    k = by_norm.num_wanted
    return [
        f"Of the {k} training rows with the largest gradient norms {by_norm.found:.0f} carry a flipped label, and of the "
        f"{k} with the largest loss {by_loss.found:.0f}; {k} rows picked at random hold {by_chance.found:.1f} on average. "
        "This is one draw: a few rows more or less between two rankings mean little.",
        f"Of the {k} rows whose gradients pull hardest against the validation gradient {against.found:.0f} are flipped. "
        "That ranking asks which rows raise the loss on clean rows, not which labels are wrong: a flip into a class that the "
        "model predicts too seldom can even lower it.",
    ]
