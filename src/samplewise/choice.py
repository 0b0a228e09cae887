"""Which parameters are captured, by name or pattern."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import Tensor, nn


def captured_parameters(
    model: nn.Module, params: Iterable[str] | None, exclude: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The trainable parameters to capture by their first name, and for every name of them that first name."""
    wanted, unwanted = (None if names is None else _patterns(names) for names in (params, exclude))
    trainable = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    for pattern in [*(wanted or ()), *(unwanted or ())]:
        if not any(fnmatchcase(name, pattern) for name, _ in trainable):
            raise ValueError(f"no trainable parameter is called {pattern!r}")
    names_of: dict[int, list[str]] = {}
    for name, parameter in trainable:
        names_of.setdefault(id(parameter), []).append(name)
    chosen: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, parameter in trainable:
        names = names_of[id(parameter)]
        if wanted is not None and not any(fnmatchcase(n, p) for n in names for p in wanted):
            continue
        if unwanted and any(fnmatchcase(n, p) for n in names for p in unwanted):
            continue
        chosen.setdefault(names[0], parameter)
        aliases[name] = names[0]
    return chosen, aliases


def _patterns(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
