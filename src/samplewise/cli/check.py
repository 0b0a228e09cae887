"""The job of `samplewise check`: a model and its inputs from words, verified, and the table with a verdict."""

import importlib
import os
import re
import sys
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from typer import BadParameter

from samplewise.errors import SamplewiseError
from samplewise.verification import verify
from samplewise.verification.table import Verification

NAMED = re.compile(r"([A-Za-z_]\w*)=(?!=)(.*)", re.DOTALL)
SHAPE = re.compile(r"\d+(?:x\d+)*")
IDS = re.compile(r"ids:(\d+(?:x\d+)*):(\d+)")


def show_check(
    factory: str,
    inputs: Iterable[str],
    *,
    batch_dim: int,
    batch_size: int | None,
    dtype: str | None,
    seed: int,
    training: bool | None,
) -> bool:
    """Prints the table and the verdict on the terminal; True if everything that was checked is right."""
    console = Console()
    model = model_from(factory, seed=seed, dtype=None if dtype is None else dtype_from(dtype), training=training)
    args, kwargs = inputs_from(inputs, dtype=dtype_of(model))
    try:
        result = verify(model, *args, batch_size=batch_size, batch_dim=batch_dim, **kwargs)
    except SamplewiseError as error:
        console.print(Text.assemble(("refused", "bold red"), f": {error}"), soft_wrap=True)
        return False
    except Exception as error:
        words = f": the model raised {type(error).__name__} on these inputs: {error}"
        console.print(Text.assemble(("failed", "bold red"), words), soft_wrap=True)
        return False
    console.print(table(result, title=f"{factory}, samples {in_words(result.samples)}"))
    unused = [n for n, p in model.named_parameters() if p.requires_grad and n not in {row.parameter for row in result.rows}]
    if unused:
        console.print(f"No gradient reached {', '.join(unused)}.", markup=False, highlight=False)
    is_right, words = verdict(result)
    console.print(Text.assemble(("right" if is_right else "wrong", "bold green" if is_right else "bold red"), f": {words}"))
    return is_right


def table(result: Verification, *, title: str) -> Table:
    """The table of a verification, a row a parameter."""
    shown = Table(title=title, title_justify="left")
    for heading in ("parameter", "op", "by", "samples"):
        shown.add_column(heading, overflow="fold")
    shown.add_column("error", justify="right", no_wrap=True)
    for row in result.rows:
        error = f"{row.error:.1e}" if row.is_right else f"{row.error:.1e} wrong"
        cells = map(Text, (row.parameter, row.ops, row.how, row.layout, error))
        shown.add_row(*cells, style=None if row.is_right else "red")
    return shown


def verdict(result: Verification) -> tuple[bool, str]:
    """Whether per-sample gradients may be trusted here, and why."""
    wrong = [row.parameter for row in result.rows if not row.is_right]
    if not result.rows:
        return False, "nothing was checked, because no output of the model is a tensor that a parameter has a part in."
    if not result.outputs_agree:
        return False, (
            f"the model gives a sample another output alone than in its batch (off by {result.output_error:.1e}): samples "
            "influence each other in it. Put layers that use statistics of the batch in eval mode: --eval."
        )
    if wrong:
        return False, f"the gradients of {', '.join(wrong)} are not those of the samples run alone."
    return True, (
        f"gradients of {len(result.rows)} parameters in the batch are those of samples {in_words(result.samples)} run alone, "
        f"to {max(row.error for row in result.rows):.1e}."
    )


def in_words(samples: tuple[int, ...]) -> str:
    return " and ".join(map(str, samples))


# --- from words --------------------------------------------------------------------------------------------------------------


def model_from(factory: str, *, seed: int = 0, dtype: torch.dtype | None = None, training: bool | None = None) -> nn.Module:
    """The model that `package.module:factory` makes, or is; the current directory is searched first."""
    hint = "FACTORY"
    module_name, colon, attribute = factory.partition(":")
    if not (module_name and colon and attribute):
        raise BadParameter(f"{factory!r} is not of the form package.module:factory.", param_hint=hint)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = attrgetter(attribute)(importlib.import_module(module_name))
        torch.manual_seed(seed)  # after the import, which may draw
        model = found if isinstance(found, nn.Module) else found()
    except Exception as error:
        raise BadParameter(f"{factory!r} made no model ({type(error).__name__}: {error}).", param_hint=hint) from error
    if not isinstance(model, nn.Module):
        raise BadParameter(f"{factory!r} made a {type(model).__name__}, not an nn.Module.", param_hint=hint)
    model = model if dtype is None else model.to(dtype)
    return model if training is None else model.train(training)


def inputs_from(specs: Iterable[str], *, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in order, and arguments by name, for specs like "4x3x32x32", "ids:4x128:50257", "mask=torch.ones(4, 128)"."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        named = NAMED.fullmatch(spec)
        if named is None:
            args.append(input_from(spec, dtype=dtype))
        else:
            kwargs[named[1]] = input_from(named[2], dtype=dtype)
    return args, kwargs


def input_from(spec: str, *, dtype: torch.dtype) -> Any:
    """Normal floats for "4x3x32x32", integers below 50257 for "ids:4x128:50257", else the value of a Python expression.

    >>> input_from("2x3", dtype=torch.float64).shape
    torch.Size([2, 3])
    >>> input_from("torch.arange(3) * 2", dtype=torch.float64).tolist()
    [0, 2, 4]
    """
    spec = spec.strip()
    if SHAPE.fullmatch(spec):
        return torch.randn(sizes(spec), dtype=dtype)
    ids = IDS.fullmatch(spec)
    try:
        return torch.randint(int(ids[2]), sizes(ids[1])) if ids else eval(spec, {"torch": torch})
    except Exception as error:
        forms = '"4x3x32x32", "ids:4x128:50257" or a Python expression over torch'
        raise BadParameter(
            f"{spec!r} gave {type(error).__name__}: {error}. An input is {forms}.", param_hint="--input"
        ) from error


def sizes(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def dtype_from(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
        raise BadParameter(f"{name!r} is not a floating-point dtype of torch.", param_hint="--dtype")
    return dtype


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first parameter of floats, in which random inputs are drawn."""
    floats: list[Tensor] = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    return floats[0].dtype if floats else torch.get_default_dtype()
