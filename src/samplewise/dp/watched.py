"""The models that are trained privately: hooks on their modules tell a session of their calls."""

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn


class Hears(Protocol):
    """What is told of calls, as `session.Session` is."""

    parameters: dict[str, Tensor]
    """What it trains."""

    def entered(self, module: nn.Module, args: tuple, kwargs: dict) -> None: ...


_WATCHED: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Hears]]" = weakref.WeakKeyDictionary()


def watch(model: nn.Module, hears: Hears) -> None:
    """From now on tells of each call of the model, or of a part of it, before it runs."""
    for module in dict.fromkeys(model.modules()):
        module.register_forward_pre_hook(_Opens(hears), with_kwargs=True)
    _WATCHED[model] = weakref.ref(hears)


def is_watched(model: nn.Module) -> bool:
    """Whether the model is trained privately already."""
    return model in _WATCHED and _WATCHED[model]() is not None


def sharing(parameters: Iterable[Tensor]) -> list[str]:
    """The names of those parameters that are trained privately already, of whatever model."""
    asked = {id(p) for p in parameters}
    trained = [hears.parameters for ref in list(_WATCHED.values()) if (hears := ref()) is not None]
    return [name for of_model in trained for name, p in of_model.items() if id(p) in asked]


class _Opens:
    """The hook on the modules of a private model; a copy of the model, or one loaded from a file, is an ordinary model."""

    def __init__(self, hears: Hears | None = None):
        self._hears = None if hears is None else weakref.ref(hears)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        hears = None if self._hears is None else self._hears()
        if hears is not None:
            hears.entered(module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_Opens":
        return _Opens()

    def __reduce__(self) -> tuple:
        return _Opens, ()
