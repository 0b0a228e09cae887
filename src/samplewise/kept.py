"""Parameters that code writes to while it is only tried out, put back."""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from samplewise.flow.call import is_in_place, op_name, tensors_in
from samplewise.inside import Insides
from samplewise.marks import has_memory

HANDING_OUT = set("numpy array dlpack".split())
"""What gives memory to somebody who may write to it unseen."""


class WriteError(Exception):
    """Something was written to that is to stay as it is; it is put back."""


class Kept(TorchFunctionMode):
    """Puts back at the end what is written to these tensors inside; they are copied only then.

    Writes are found out and not refused: a forward that raises would set off hooks of others.

    >>> t = torch.ones(2)
    >>> with Kept([t]):
    ...     print(t.mul_(3).tolist())
    [3.0, 3.0]
    >>> t.tolist()
    [1.0, 1.0]
    """

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self._insides = Insides()
        self._tensors = [(_memory(t), t) for t in tensors]
        self._before: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """By id: what was written to, on the memory it had, and what that held."""
        self._writer = ""
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._depth -= 1
        if self._depth:  # entered again, to look inside a function
            return
        with torch.no_grad():
            for t, held, before in self._before.values():
                held.copy_(before)
                t.data = held

    def let_go(self) -> None:
        """Lets what was written stay."""
        self._before.clear()

    def check(self) -> None:
        """Raises a WriteError if something was written to."""
        if self._before:
            raise WriteError(self._writer)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        writes = is_in_place(func) or name in HANDING_OUT or (name == "data" and len(args) == 2)
        self._keep(name, tensors_in((*(args[:1] if writes else ()), kwargs.get("out"))))
        out = self._insides.run(self, func, args, kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out

    def _keep(self, name: str, written: list[Tensor]) -> None:
        """Copies what is about to be written to, as it is and not as a tracer would have it."""
        memory = {_memory(t) for t in written} - {0}
        for place, t in self._tensors:
            if place in memory and id(t) not in self._before:
                with _disable_current_modes():
                    self._before[id(t)], self._writer = (t, t.data, t.detach().clone()), name


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata if not is_lazy(t) and has_memory(t) else 0
