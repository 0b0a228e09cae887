"""Higher-order ops, which are given functions: `torch.cond`, `map`, `scan`, `while_loop`, flex attention."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from samplewise.errors import UnattributedError


def run_branch(pred: Any, true_fn: Callable, false_fn: Callable, operands: Any = ()) -> Any:
    """What `torch.cond` gives: the branch that is taken."""
    return (true_fn if pred else false_fn)(*operands)


def refuse_hidden(name: str, args: tuple, kwargs: dict) -> None:
    """Raises where the functions that the op is given use what needs a gradient and is no argument.

    Without torch.compile, which makes arguments of all that such functions use, torch gives it none.
    """
    for function in tree_leaves((args, kwargs)):
        if not isinstance(function, Tensor) and callable(function):
            for t in _reached(function, set()):
                if t.requires_grad:
                    raise UnattributedError(
                        f"{name} is given a function that uses a tensor {tuple(t.shape)} which needs a gradient and is none of its "
                        "arguments: run op by op, as inside of a capture, torch gives that no gradient. Hand it over as an argument, "
                        "or write the op out in Python."
                    )


def _reached(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors that a function can reach: what it closes over, its defaults, globals that it names, the object it is bound to."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, types.FunctionType):
        variables = inspect.getclosurevars(value)
        defaults = (value.__defaults__, value.__kwdefaults__)
        yield from _reached([*variables.nonlocals.values(), *variables.globals.values(), *defaults], seen)
    elif isinstance(value, types.MethodType):
        yield from _reached([value.__func__, value.__self__], seen)
    elif isinstance(value, functools.partial):
        yield from _reached([value.func, value.args, value.keywords], seen)
    elif isinstance(value, list | tuple | set | frozenset | dict):
        for held in list(value.values() if isinstance(value, dict) else value):
            yield from _reached(held, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        yield from _reached(vars(value), seen)
