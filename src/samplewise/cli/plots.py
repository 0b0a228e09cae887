"""The pictures of the demo's page as PNG bytes, drawn without a display."""

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
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
    """Recall of the flipped labels against rows inspected, a curve a ranking, with the line of chance."""
    figure, axes = _axes(theme)
    N, k = len(found.digits.x), int(found.digits.is_flipped.sum())
    for (name, order), colour, dashes in zip(found.orders.items(), theme.curves, DASHES, strict=True):
        axes.plot(100 * recall_curve(order, found.digits.is_flipped).numpy(), color=colour, ls=dashes, lw=2, label=name)
    axes.plot([0, N], [0, 100], color=theme.ink, lw=1, alpha=0.55, label="chance")
    axes.axvline(k, color=theme.ink, lw=0.8, ls=":")
    axes.annotate(f"{k} rows", (k, 2), xytext=(4, 0), textcoords="offset points", color=theme.ink, fontsize=8)
    axes.set(xlabel="training rows inspected, most suspicious first", ylabel="flipped labels found (%)")
    axes.set(xlim=(0, N), ylim=(0, 103))
    axes.legend(loc="lower right", frameon=False, labelcolor=theme.ink)
    return _png(figure)


def norm_histogram(found: Findings, theme: Theme) -> bytes:
    """How many clean and how many flipped rows have a gradient norm in each range; both axes are logarithmic."""
    figure, axes = _axes(theme)
    norms, is_flipped = found.scores[NORM].clamp_min(1e-6), found.digits.is_flipped
    edges = np.geomspace(norms.min().item(), norms.max().item() * 1.001, 41)
    for name, rows, colour in (("clean", ~is_flipped, theme.clean), ("flipped", is_flipped, theme.flipped)):
        axes.hist(
            norms[rows].numpy(), bins=edges.tolist(), color=colour, alpha=0.8, label=f"{name} ({int(rows.sum())} rows)"
        )
    axes.set(xscale="log", yscale="log", xlabel="gradient norm, mean over the epochs", ylabel="training rows")
    axes.legend(loc="upper left", frameon=False, labelcolor=theme.ink)
    return _png(figure)


def digit_image(image: Tensor) -> bytes:
    """An 8 × 8 grey picture of an image [1, 8, 8] in 0..1, to be enlarged where it is shown."""
    data = BytesIO()
    imsave(data, image[0].numpy(), cmap="gray", vmin=0, vmax=1, format="png")
    return data.getvalue()


def _axes(theme: Theme) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.0), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.grid(color=theme.faint, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    axes.tick_params(which="both", color=theme.faint, labelcolor=theme.ink)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    return figure, axes


def _png(figure: Figure) -> bytes:
    data = BytesIO()
    figure.savefig(data, format="png", transparent=True)
    return data.getvalue()
