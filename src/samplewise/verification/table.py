"""What a verification found: a table with a row a parameter, and what to say where it is wrong."""

from dataclasses import dataclass

from samplewise.queries import Grads


@dataclass(frozen=True)
class Row:
    """One parameter in the table of a verification."""

    parameter: str
    ops: str
    how: str
    layout: str
    error: float
    """‖captured - true‖ / (‖true‖ + 0.01 ‖largest true gradient of the model‖) of the worst sample checked."""
    is_right: bool


@dataclass(frozen=True)
class Verification:
    """What was checked and how far it is from truth."""

    rows: tuple[Row, ...]
    samples: tuple[int, ...]
    output_error: float
    """The largest difference of an output from that of the sample alone, relative to the largest output; inf for other shapes."""
    outputs_agree: bool

    @property
    def is_right(self) -> bool:
        return self.outputs_agree and all(row.is_right for row in self.rows)

    def __str__(self) -> str:
        header = ("parameter", "op", "by", "samples", "error")
        lines = [(r.parameter, r.ops, r.how, r.layout, f"{r.error:.1e}{'' if r.is_right else ' wrong'}") for r in self.rows]
        widths = [max(len(line[k]) for line in [header, *lines]) for k in range(len(header))]
        table = [
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [header, *lines]
        ]
        agree = "agree" if self.outputs_agree else "DIFFER"
        table.append(f"outputs of samples {list(self.samples)} alone and in the batch {agree} ({self.output_error:.1e})")
        return "\n".join(table)


def row_of(name: str, grads: Grads, error: float, is_right: bool) -> Row:
    """The row of a parameter, with how its uses were understood."""
    notes = grads.notes.get(name, [])
    ops = ", ".join(dict.fromkeys(note.op for note in notes))
    how = ", ".join(dict.fromkeys(note.how for note in notes))
    layouts = list(dict.fromkeys(str(note.layout) for note in notes))
    return Row(name, ops, how, layouts[0] if len(layouts) == 1 else f"{len(layouts)} layouts", error, is_right)


def complaint(result: Verification) -> str:
    """What is wrong, why it stops, and the ways out."""
    if not result.outputs_agree:
        what = "the model gives a sample another output alone than in its batch: samples influence each other in it"
    else:
        row = next(row for row in result.rows if not row.is_right)
        what = f"the gradient of parameter {row.parameter!r} (used by {row.ops}) is not that of the sample run alone"
    return (
        f"{what}. Per-sample gradients would be wrong.\n{result}\nPut layers that use statistics of the batch in eval mode, "
        "mark data that reaches the model in another way than as an argument, or leave parameters out with exclude=[...]. "
        "If a sample alone rightly differs, turn this check off: capture(model, verify=False)."
    )
