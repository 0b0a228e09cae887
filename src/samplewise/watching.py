"""Calls of modules, told to whoever listens in the thread that makes them."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn

Modules = frozenset[nn.Module]


class Listener(Protocol):
    """Hears of calls of the modules it watches."""

    def entered(self, module: nn.Module, args: tuple, kwargs: dict) -> None: ...
    def left(self, module: nn.Module) -> None: ...


_lock = threading.Lock()
_here = threading.local()
OURS: Any = "samplewise"
"""Our hooks' place among the hooks of a module. Put there by hand: registering 300 hooks a step took 1.2 ms, this 0.1 ms."""


def _listeners() -> list[tuple[Listener, Modules]]:
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


def _put_on_pre(module: nn.Module) -> None:
    module._forward_pre_hooks[OURS] = _entered
    module._forward_pre_hooks_with_kwargs[OURS] = True


def _take_off_pre(module: nn.Module) -> None:
    del module._forward_pre_hooks[OURS], module._forward_pre_hooks_with_kwargs[OURS]


def _put_on_post(module: nn.Module) -> None:
    module._forward_hooks[OURS] = _left
    module._forward_hooks_always_called[OURS] = True


def _take_off_post(module: nn.Module) -> None:
    del module._forward_hooks[OURS], module._forward_hooks_always_called[OURS]


class Hooks:
    """Hooks of one sort: on a module while anybody, in whatever thread, hears of it."""

    def __init__(self, put_on: Callable[[nn.Module], None], take_off: Callable[[nn.Module], None]):
        self._put_on, self._take_off = put_on, take_off
        self._heard: dict[Watch, Modules] = {}

    def hear(self, watch: "Watch", modules: Modules) -> None:
        """From now on the watch hears of these modules, and of no others."""
        with _lock:
            before = self._heard.pop(watch, frozenset())
            others = self._heard.values()
            for module in before.difference(modules, *others):
                self._take_off(module)
            for module in modules.difference(before, *others):
                self._put_on(module)
            if modules:
                self._heard[watch] = modules


_calls, _returns = Hooks(_put_on_pre, _take_off_pre), Hooks(_put_on_post, _take_off_post)


class Watch:
    """While open, tells `listener` of the calls of these modules that this thread makes."""

    def __init__(self, listener: Listener, modules: Iterable[nn.Module]):
        self._entry = (listener, frozenset(modules))
        self.hear_all()
        _listeners().append(self._entry)

    def hear_only(self, module: nn.Module) -> None:
        """Until `hear_all` tells of calls of this module alone, and of their end: a hook costs each call of a module 10 µs."""
        only = frozenset([module])
        _calls.hear(self, only)
        _returns.hear(self, only)

    def hear_all(self) -> None:
        """Tells of the calls of all modules; of ends as before: torch goes over the hooks of a module as it tells of its end."""
        _calls.hear(self, self._entry[1])

    def remove(self) -> None:
        _listeners().remove(self._entry)
        _calls.hear(self, frozenset())
        _returns.hear(self, frozenset())
