"""Which parameters are captured, and which are asked about together, by name or pattern."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samplewise.errors import SamplewiseError

Named = list[tuple[str, nn.Module]]
"""Modules with their names, a dot behind each; the model's own is empty."""


def named_parts(model: nn.Module) -> Named:
    """The model and all modules in it, under every name that they have, in the order of `named_modules`.

    Which takes five times as long, 0.3 ms for 164 modules, walked twice a step (Xeon): it is asked if one has its own.
    """
    found: Named = []

    def walk(prefix: str, module: nn.Module) -> None:
        found.append((prefix, module))
        for name, child in module._modules.items():
            if child is not None:
                walk(f"{prefix}{name}.", child)

    walk("", model)
    if all(cls.named_modules is nn.Module.named_modules for cls in {type(module) for _, module in found}):
        return found
    return [(f"{name}." if name else "", module) for name, module in model.named_modules(remove_duplicate=False)]


def _named_parameters(model: nn.Module, parts: Named) -> list[tuple[str, Tensor]]:
    """The model's parameters under every name that they have, as the model says where it has its own words."""
    said = (getattr(method, "__func__", None) for method in (model.named_parameters, model._named_members))
    if tuple(said) != (nn.Module.named_parameters, nn.Module._named_members):
        return list(model.named_parameters(remove_duplicate=False))
    return [
        (prefix + name, p)
        for prefix, module in parts
        if module._parameters
        for name, p in module._parameters.items()
        if p is not None
    ]


def refuse_lazy(parameters: Iterable[tuple[str, Tensor]]) -> None:
    for name, p in parameters:
        if is_lazy(p):
            raise SamplewiseError(
                f"parameter {name!r} of a lazy module has no shape yet, so it cannot be told where it is used. Call the model once on "
                "a batch before, as its optimizer needs it too."
            )


def captured_parameters(
    model: nn.Module, parts: Named, params: Iterable[str] | None, exclude: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The trainable parameters to capture by their first name, and for every name of them that first name."""
    wanted, unwanted = (None if names is None else _patterns(names) for names in (params, exclude))
    trainable = [(name, p) for name, p in _named_parameters(model, parts) if p.requires_grad]
    refuse_lazy(trainable)
    for pattern in [*(wanted or ()), *(unwanted or ())]:
        if not any(fnmatchcase(name, pattern) for name, _ in trainable):
            raise ValueError(f"no trainable parameter is called {pattern!r}")
    first_names: dict[int, str] = {}
    for name, parameter in trainable:
        first_names.setdefault(id(parameter), name)
    ids = first_names.keys() if wanted is None else _matching(trainable, wanted)
    ids = ids - _matching(trainable, unwanted) if unwanted else ids
    aliases = {name: first_names[id(parameter)] for name, parameter in trainable if id(parameter) in ids}
    return {name: parameter for name, parameter in trainable if aliases.get(name) == name}, aliases


def _matching(parameters: Sequence[tuple[str, Tensor]], patterns: list[str]) -> set[int]:
    """The ids of those that have a name, one of several perhaps, which matches a pattern."""
    return {id(parameter) for name, parameter in parameters if any(fnmatchcase(name, p) for p in patterns)}


def _patterns(names: Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


Groups = str | Iterable[str] | Mapping[str, str | Iterable[str]]
"""Patterns, one a group; or {group: its patterns}; or "layer", one group a module."""


def grouped(aliases: Mapping[str, str], groups: Groups) -> dict[str, list[str]]:
    """{group: the first names of its parameters}; every captured parameter is in one group, the first that matches it.

    `aliases` has for every name of a captured parameter its first name.

    >>> grouped({"a.weight": "a.weight", "a.bias": "a.bias", "b.weight": "b.weight"}, "layer")
    {'a': ['a.weight', 'a.bias'], 'b': ['b.weight']}
    >>> grouped({"a.weight": "a.weight", "a.bias": "a.bias", "b.weight": "b.weight"}, {"biases": "*.bias", "rest": "*"})
    {'biases': ['a.bias'], 'rest': ['a.weight', 'b.weight']}
    """
    chosen: dict[str, list[str]] = {}
    if groups == "layer":
        for first in dict.fromkeys(aliases.values()):
            chosen.setdefault(first.rpartition(".")[0], []).append(first)
        return chosen
    wanted = groups if isinstance(groups, Mapping) else {pattern: pattern for pattern in _patterns(groups)}
    left = dict.fromkeys(aliases.values())
    for group, patterns in wanted.items():
        names = [first for name, first in aliases.items() if any(fnmatchcase(name, p) for p in _patterns(patterns))]
        chosen[group] = [first for first in left if first in names]
        if not chosen[group]:
            why = "an earlier group has all that it matches" if names else "no captured parameter is called so"
            raise ValueError(f"group {group!r} ({', '.join(_patterns(patterns))}) has no parameters: {why}")
        left = {first: None for first in left if first not in names}
    if left:
        raise ValueError(f"no group has {', '.join(map(repr, left))}; a last group with the pattern '*' takes what is left")
    return chosen
