"""Randomness held still: dropout passes everything, noise is its mean."""

import copy
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samplewise.flow.call import op_name
from samplewise.inside import Insides
from samplewise.undo import Undo

DROPOUT = set("dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout".split())
NOISE = {
    "rand": 0.5, "rand_like": 0.5, "randn": 0.0, "randn_like": 0.0, "normal": 0.0, "bernoulli": 1.0, "uniform": 0.5,
    "exponential": 1.0, "geometric": 1.0, "cauchy": 0.0, "log_normal": 1.0, "random": 0, "poisson": 1.0, "binomial": 1.0,
}  # fmt: skip
"""What a random number is replaced by, so that it does not depend on how many are drawn."""


class Still(TorchFunctionMode):
    """Runs random ops without their randomness."""

    def __init__(self) -> None:
        super().__init__()
        self._insides = Insides()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        if name in DROPOUT and args:
            return args[0]
        if name in NOISE:
            out = func(*args, **kwargs)
            with torch.no_grad():
                return out.fill_(NOISE[name]) if isinstance(out, Tensor) else out
        if name in ("randint", "randint_like"):
            out = func(*args, **kwargs)
            return out.fill_(_lowest(name, args, kwargs))
        if name == "multinomial":
            return args[0].topk(args[1], dim=-1).indices
        if name == "rrelu":
            args, kwargs = args[:3], {k: v for k, v in kwargs.items() if k != "training"}
        if name == "scaled_dot_product_attention":
            kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # (..., has_biases, num_layers, dropout, train, ...)
            floats = [i for i, a in enumerate(args) if isinstance(a, float)]
            args = tuple(0.0 if i in floats else a for i, a in enumerate(args))
        out = self._insides.run(self, func, args, kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if name in ("batch_norm", "instance_norm") and out.requires_grad:
            out.register_hook(
                Tensor.contiguous
            )  # torch 2.15's backward on the CPU is wrong for some strides of the gradient
        return out


def _lowest(name: str, args: tuple, kwargs: dict[str, Any]) -> int:
    """The least number that randint(high, size), randint(low, high, size) or randint_like(t, [low,] high) gives.

    >>> _lowest("randint", (9, (2,)), {}), _lowest("randint", (1, 9, (2,)), {}), _lowest("randint", (1,), {"high": 9, "size": (2,)})
    (0, 1, 1)
    """
    bounds = [a for a in args[name == "randint_like" :] if isinstance(a, int)]
    return kwargs.get("low", bounds[0] if len(bounds) + ("high" in kwargs) > 1 else 0)


@contextmanager
def same_randomness(module: nn.Module, *, seed: int = 0) -> Iterator[None]:
    """Random state of torch, Python and NumPy fixed inside, and put back afterwards."""
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(gpus_of(module)):
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


class RandomnessPutBack:
    """Torch's generators as they were, at the end of the block."""

    def __init__(self, gpus: list[int]):
        self._gpus, self._is_let_go = gpus, False

    def __enter__(self) -> "RandomnessPutBack":
        self._state = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in self._gpus]
        return self

    def __exit__(self, *_: Any) -> None:
        if not self._is_let_go:
            torch.set_rng_state(self._state[0])
            for gpu, state in zip(self._gpus, self._state[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)

    def let_go(self) -> None:
        """Lets what was drawn be drawn."""
        self._is_let_go = True


def gpus_of(module: nn.Module) -> list[int]:
    """The numbers of the GPUs that its parameters are on."""
    return sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})


def twin(module: nn.Module, *, own_parameters: bool = False) -> nn.Module:
    """The module once more: running it leaves buffers and attributes of the module alone, and parameters if it has its `own`."""
    return _twin(module, {id(p): _copied(p) for p in module.parameters()} if own_parameters else {})


def _copied(p: Tensor) -> Tensor:
    return nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)


def _twin(module: nn.Module, own: dict[int, Tensor]) -> nn.Module:
    """The twin with these tensors in the place of parameters, by id, also of those in lists, as recurrent layers keep them."""
    cls = (
        module.__class__
    )  # a `__new__` in Python does more than make it: that of fx.GraphModule makes a class without forward
    copied = object.__new__(cls) if isinstance(cls.__new__, types.FunctionType) else cls.__new__(cls)
    instead = lambda v: own.get(id(v), v)
    attributes = {k: copy.copy(v) if isinstance(v, dict | list | set) else v for k, v in vars(module).items()}
    attributes |= {k: list(map(instead, v)) for k, v in attributes.items() if own and type(v) is list}
    attributes |= {k: v.clone() for k, v in attributes.items() if type(v) is Tensor and not v.requires_grad}
    vars(copied).update(attributes)
    vars(copied)["_parameters"] = {k: instead(p) for k, p in module._parameters.items()}
    vars(copied)["_buffers"] = {k: None if b is None else b.detach().clone() for k, b in module._buffers.items()}
    vars(copied)["_modules"] = {k: None if m is None else _twin(m, own) for k, m in module._modules.items()}
    return copied


@contextmanager
def attributes_put_back(module: nn.Module) -> Iterator[None]:
    """Attributes, and tensors among them, as they were: for a forward that reaches the module itself and not its twin."""
    modules = list(module.modules())
    attributes = [{k: (v, copy.copy(v) if isinstance(v, list | dict | set) else None) for k, v in _own(m)} for m in modules]
    plain = [v for m in modules for _, v in _own(m) if isinstance(v, Tensor) and not v.requires_grad]
    undo = Undo([*module.buffers(), *plain])
    try:
        yield
    finally:
        for m, before in zip(modules, attributes, strict=True):
            for k, _ in _own(m):
                if k not in before:
                    del vars(m)[k]
            for k, (value, contents) in before.items():
                vars(m)[k] = value
                if contents is not None and not _holds_the_same(value, contents):
                    value.clear()
                    value.extend(contents) if isinstance(value, list) else value.update(contents)
        undo()


def _holds_the_same(container: list | dict | set, other: Any) -> bool:
    """Whether the two hold the same objects; those that nobody changed are left alone, for some cannot be changed."""
    if isinstance(container, set):
        return container == other
    objects = lambda c: [*map(id, c), *(map(id, c.values()) if isinstance(c, dict) else ())]
    return objects(container) == objects(other)


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that the module's class or user gave it, beside those that every module has."""
    return [(k, v) for k, v in vars(module).items() if k not in INTERNAL]


INTERNAL = frozenset(vars(nn.Module()))
