"""The commands and their options; each hands over to the file that does the work."""

from pathlib import Path
from typing import Annotated

import typer

from samplewise import __version__

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="The gradient of every sample in a batch, for any PyTorch model."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"samplewise {__version__}")
        raise typer.Exit


@app.callback()
def samplewise(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    flipped: Annotated[
        float, typer.Option(min=0.01, max=0.5, help="Fraction of the training labels to flip to another class.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split, the flips, the model and the training.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training rows; gradients are taken after each.")] = 20,
    output: Annotated[Path, typer.Option(dir_okay=False, writable=True, help="The page to write.")] = Path(
        "samplewise-demo.html"
    ),
) -> None:
    """Find flipped labels among handwritten digits by their per-sample gradients."""
    from samplewise.cli.console import show_demo

    show_demo(flipped=flipped, seed=seed, epochs=epochs, output=output)
