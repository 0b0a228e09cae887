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


@app.command()
def check(
    factory: Annotated[str, typer.Argument(help="What makes the model: package.module:factory.", show_default=False)],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="An argument of the model, again for each: 4x3x32x32 (normal floats), ids:4x128:50257 (integers below "
            "50257), a Python expression over torch, or name=... with any of these.",
            show_default=False,
        ),
    ],
    batch_dim: Annotated[int, typer.Option(min=0, help="Along which dimension of the inputs the samples lie.")] = 0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="How many samples there are.", show_default="read off")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="What the model and its inputs are cast to: float64, ...", show_default="as made")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the inputs.")] = 0,
    training: Annotated[
        bool | None, typer.Option("--train/--eval", help="The mode of the model.", show_default="as made")
    ] = None,
) -> None:
    """Check the per-sample gradients of a model against samples run alone; exit status 1 if they are wrong or refused."""
    from samplewise.cli.check import show_check

    is_right = show_check(
        factory, inputs, batch_dim=batch_dim, batch_size=batch_size, dtype=dtype, seed=seed, training=training
    )
    raise typer.Exit(0 if is_right else 1)


@app.command()
def audit(
    epsilon: Annotated[float, typer.Option(min=0.01, help="The claim: what the noise is chosen for.")] = 3.0,
    delta: Annotated[float, typer.Option(min=0, max=0.1, help="The claim's probability of failure.")] = 1e-5,
    canaries: Annotated[int, typer.Option(min=10, help="How many samples are in or out by a fair coin.")] = 1000,
    black_box: Annotated[
        bool,
        typer.Option("--black-box", help="Canaries of random pixels, judged by their loss under the last model alone."),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="How many private steps are taken.")] = 30,
    batch_size: Annotated[int, typer.Option(min=1, max=1000, help="How many rows are drawn for a step, on average.")] = 512,
    confidence: Annotated[
        float, typer.Option(min=0.51, max=0.9999, help="1 - the probability of refuting a claim that holds.")
    ] = 0.95,
    broken: Annotated[bool, typer.Option("--broken", help="Train with a tenth of the noise; this must be refuted.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the coins, the canaries and the training.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, writable=True, help="Where to write the figures as JSON.", show_default="nowhere"),
    ] = None,
) -> None:
    """Try to refute the privacy of our own private training by canaries; exit status 1 if it leaks more than it claims."""
    from samplewise.cli.audit import show_audit

    stands = show_audit(
        epsilon=epsilon,
        delta=delta,
        canaries=canaries,
        black_box=black_box,
        steps=steps,
        batch_size=batch_size,
        confidence=confidence,
        broken=broken,
        seed=seed,
        output=output,
    )
    raise typer.Exit(0 if stands else 1)
