"""Calls of modules, told to whoever listens in the thread that makes them."""

import threading
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn


class Listener(Protocol):
    """Hears of calls of the modules it watches."""

    def entered(self, module: nn.Module, args: tuple, kwargs: dict) -> None: ...
    def left(self, module: nn.Module) -> None: ...


class _Hooks:
    """The hooks on one module, shared by all who watch it: added by the first, taken off by the last.

    Adding a hook while another thread runs the module would disturb that thread.
    """

    def __init__(self, module: nn.Module):
        self.num_watchers = 0
        self.handles = (
            module.register_forward_pre_hook(_entered, with_kwargs=True),
            module.register_forward_hook(_left, always_call=True),
        )


_hooks: dict[nn.Module, _Hooks] = {}
_lock = threading.Lock()
_here = threading.local()


def _listeners() -> list[tuple[Listener, set[nn.Module]]]:
    if not hasattr(_here, "listeners"):
        _here.listeners = []
    return _here.listeners


def _entered(module: nn.Module, args: tuple, kwargs: dict) -> None:
    for listener, modules in list(_listeners()):
        if module in modules:
            listener.entered(module, args, kwargs)


def _left(module: nn.Module, args: Any, out: Any) -> None:
    for listener, modules in list(_listeners()):
        if module in modules:
            listener.left(module)


class Watch:
    """While open, tells `listener` of the calls of these modules that this thread makes."""

    def __init__(self, listener: Listener, modules: Iterable[nn.Module]):
        self.entry = (listener, set(modules))
        with _lock:
            for module in self.entry[1]:
                hooks = _hooks.setdefault(module, _hooks.get(module) or _Hooks(module))
                hooks.num_watchers += 1
        _listeners().append(self.entry)

    def remove(self) -> None:
        _listeners().remove(self.entry)
        with _lock:
            for module in self.entry[1]:
                _hooks[module].num_watchers -= 1
                if _hooks[module].num_watchers == 0:
                    for handle in _hooks.pop(module).handles:
                        handle.remove()
