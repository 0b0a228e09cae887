"""The pictures of the demo's page as PNG bytes, drawn without a display."""

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import NullFormatter
from torch import Tensor

from samplewise.cli.demo import NORM, Findings
from samplewise.cli.ranking import recall_curve


@dataclass(frozen=True)
class Theme:
    """The colours of a plot that lies on a light or a dark page."""

    ink: str
    faint: str
    curves: tuple[str, ...]
    flipped: str
    clean: str


LIGHT = Theme(ink="#1f2430", faint="#d9dce3", curves=("#c2410c", "#2563eb", "#0f766e"), flipped="#c2410c", clean="#94a3b8")
DARK = Theme(ink="#e6e8ee", faint="#3a404d", curves=("#fb923c", "#7aa8ff", "#4fd1c0"), flipped="#fb923c", clean="#64748b")
DASHES = ("solid", (0, (5, 1.5)), (0, (1.5, 1)))


def recall_plot(found: Findings, theme: Theme) -> bytes:
    """Recall of the flipped labels against rows inspected, a curve a ranking and one for chance; the top, then all."""
    figure = Figure(figsize=(10, 3.8), dpi=160, layout="constrained")
    N, k = len(found.digits.x), found.digits.num_flipped
    for place, last in ((1, min(3 * k, N)), (2, N)):
        axes = _axes(figure, theme, place=place, of=2)
        for (name, order), colour, dashes in zip(found.orders.items(), theme.curves, DASHES, strict=True):
            axes.plot(100 * recall_curve(order, found.digits.is_flipped).numpy(), color=colour, ls=dashes, lw=2, label=name)
        axes.plot([0, N], [0, 100], color=theme.ink, lw=1, alpha=0.6, label="chance")
        axes.axvline(k, color=theme.ink, lw=0.8, ls=":")
        axes.set(xlim=(0, last), ylim=(0, 103), xlabel=f"training rows inspected, up to {last:,} of {N:,}")
        if place == 1:
            axes.set_ylabel("flipped labels found (%)")
            axes.annotate(f"{k} rows", (k, 35), xytext=(4, 0), textcoords="offset points", color=theme.ink)
        else:
            axes.legend(loc="lower right", frameon=False, labelcolor=theme.ink)
    return _png(figure)


def norm_histogram(found: Findings, theme: Theme) -> bytes:
    """How many clean and how many flipped rows have a gradient norm in each range of a logarithmic axis."""
    figure = Figure(figsize=(10, 3), dpi=160, layout="constrained")
    axes = _axes(figure, theme, place=1, of=1)
    norms, is_flipped = found.scores[NORM].clamp_min(1e-6), found.digits.is_flipped
    edges = np.geomspace(norms.min().item(), norms.max().item() * 1.001, 61).tolist()
    for name, rows, colour in (("clean", ~is_flipped, theme.clean), ("flipped", is_flipped, theme.flipped)):
        axes.hist(norms[rows].numpy(), bins=edges, color=colour, alpha=0.8, label=f"{name} ({int(rows.sum()):,} rows)")
    axes.set(xscale="log", xlabel="gradient norm, mean over the epochs", ylabel="training rows")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper left", bbox_to_anchor=(0, 1.16), ncols=2, frameon=False, labelcolor=theme.ink)
    return _png(figure)


def digit_image(image: Tensor) -> bytes:
    """An 8 × 8 grey picture of an image [1, 8, 8] in 0..1, to be enlarged where it is shown."""
    data = BytesIO()
    imsave(data, image[0].numpy(), cmap="gray", vmin=0, vmax=1, format="png")
    return data.getvalue()


def _axes(figure: Figure, theme: Theme, *, place: int, of: int) -> Axes:
    axes = figure.add_subplot(1, of, place)
    axes.set_facecolor("none")
    axes.grid(color=theme.faint, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    axes.tick_params(which="both", color=theme.faint, labelcolor=theme.ink)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    return axes


def _png(figure: Figure) -> bytes:
    data = BytesIO()
    figure.savefig(data, format="png", transparent=True)
    return data.getvalue()
