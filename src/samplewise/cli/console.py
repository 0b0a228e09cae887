"""What the demo shows on the terminal: a progress bar, the table of results, and where the page is."""

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from samplewise.cli.demo import CHANCE, Epoch, Findings, findings, flipped_digits, small_cnn, training
from samplewise.cli.report import demo_page
from samplewise.cli.results import cells, headings, in_words


def show_demo(*, flipped: float, seed: int, epochs: int, output: Path) -> None:
    """Runs the demo on the terminal and writes its page to `output`."""
    console, start = Console(), time.perf_counter()
    output.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    digits = flipped_digits(fraction=flipped, generator=generator)
    console.print(f"{len(digits.x):,} digits to train on, {digits.num_flipped} of them with a flipped label; seed {seed}")
    model = small_cnn(seed=seed)
    history: list[Epoch] = []
    with progress_bar(console) as bar:
        task = bar.add_task("training", total=epochs, state="")
        for epoch in training(model, digits, epochs=epochs, generator=generator):
            history.append(epoch)
            bar.update(task, advance=1, state=f"loss {epoch.loss:.3f}  test accuracy {epoch.accuracy:.1%}")
    found = findings(model, digits, history)
    seconds = time.perf_counter() - start
    output.write_text(demo_page(found, seed=seed, epochs=epochs, seconds=seconds), encoding="utf-8")
    console.print(results(found))
    for remark in in_words(found):
        console.print(remark, highlight=False)
    console.print(f"\nThe page: {output.resolve()}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"Took {time.perf_counter() - start:.1f} s", highlight=False)


def progress_bar(console: Console) -> Progress:
    """A bar with the loss and the test accuracy of the last epoch beside it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
    )


def results(found: Findings) -> Table:
    """The table of results, a row a ranking."""
    first, *others = headings(found.qualities[CHANCE].num_wanted)
    table = Table(title="Flipped labels found, by ranking", title_justify="left")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    for name, quality in found.qualities.items():
        table.add_row(*cells(name, quality), style="dim" if name == CHANCE else None)
    return table
