"""What a mode does not see by itself, brought into its sight while captures are open.

Compiled functions run op by op, scripted ones as the Python they were made of, and an `autograd.Function` asks for overrides as
ops do.
"""

import inspect
import sys
import threading
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.jit._state import _try_get_jit_cached_function
from torch.overrides import handle_torch_function

from samplewise.errors import SamplewiseError
from samplewise.tracing import is_tracing

_apply = inspect.getattr_static(torch.autograd.Function, "apply")
_call_script = torch._C.ScriptFunction.__call__  # type: ignore[attr-defined]
_lock = threading.Lock()
_num_open = 0
_stance: Any = None


class CustomFunction:
    """`apply` of somebody's `autograd.Function`, as a mode is told of it."""

    def __init__(self, cls: type[torch.autograd.Function]):
        self.cls = cls
        self.__name__ = cls.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)

    def without_override(self, *args: Any, **kwargs: Any) -> Any:
        """The call itself; ops inside are still told to the mode."""
        return _apply.__get__(None, self.cls)(*args, **kwargs)


def _seen_apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    if cls is torch.utils.checkpoint.CheckpointFunction and is_tracing():
        raise SamplewiseError(
            "the step cannot be compiled: checkpoint(..., use_reentrant=True) calls backward inside of backward, where a graph has "
            "no place for it. Use use_reentrant=False, or take the step op by op: per_sample_step(..., compile=False)."
        )
    if not torch._C._is_torch_function_mode_enabled() or torch._C._are_functorch_transforms_active() or _is_ours(cls):
        return _apply.__get__(None, cls)(*args, **kwargs)
    return handle_torch_function(CustomFunction(cls), (), *args, **kwargs)  # type: ignore[arg-type]


def _seen_script(self: Any, *args: Any, **kwargs: Any) -> Any:
    source = getattr(self, "_torchdynamo_inline", None)
    if source is None or not torch._C._is_torch_function_mode_enabled() or _try_get_jit_cached_function(source) is None:
        return _call_script(self, *args, **kwargs)  # a traced function's Python may do something else than was traced
    return source(*args, **kwargs)


def _is_ours(cls: type[torch.autograd.Function]) -> bool:
    """Whether it is one of torch's Functions or of these: checkpoints, hooks, taps."""
    return cls.__module__.partition(".")[0] in ("torch", "samplewise")


def function_of(t: Tensor) -> tuple[str, int] | None:
    """The name of somebody's Function that gave this tensor, and the number of its node in autograd's count; None if none did."""
    node = t.grad_fn
    if not isinstance(node, BackwardCFunction) or _is_ours(node._forward_cls):  # type: ignore[attr-defined]
        return None
    return node._forward_cls.__name__, node._sequence_nr()  # type: ignore[attr-defined]


def open_eyes() -> None:
    """Makes the changes, if no capture of any thread is open yet."""
    global _num_open, _stance
    with _lock:
        _num_open += 1
        if _num_open == 1:
            torch.autograd.Function.apply = classmethod(_seen_apply)  # type: ignore[method-assign, assignment]
            torch._C.ScriptFunction.__call__ = _seen_script  # type: ignore[attr-defined]
        if _stance is None and "torch._dynamo" in sys.modules:  # otherwise nothing can have been compiled
            _stance = torch.compiler.set_stance("force_eager")


def close_eyes() -> None:
    """Undoes them, if no other capture is open."""
    global _num_open, _stance
    with _lock:
        _num_open -= 1
        if _num_open == 0:
            torch.autograd.Function.apply = _apply  # type: ignore[method-assign]
            torch._C.ScriptFunction.__call__ = _call_script  # type: ignore[attr-defined]
            if _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None
