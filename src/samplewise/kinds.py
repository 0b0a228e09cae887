"""What each function is that a mode is told of, found out once a function."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from samplewise.flow.call import op_name, tensors_in
from samplewise.flow.handlers import flows_by_shapes
from samplewise.inside import ENGINE, without_override

OPAQUE = set(
    "array backward_hooks base contains data_ptr deepcopy device dim dtype element_size format get_device grad grad_fn "
    "has_names hash is_complex is_contiguous is_cpu is_cuda is_floating_point is_inference is_leaf is_meta is_mkldnn is_mps "
    "is_nested is_quantized is_same_size is_set_to is_signed is_sparse is_view is_xla is_xpu item itemsize layout len names "
    "nbytes ndim nelement numel numpy output_nr reduce_ex register_hook register_post_accumulate_grad_hook repr "
    "requires_grad retain_grad shape size storage_offset stride tolist untyped_storage version as_subclass".split()
)
"""Questions about a tensor that give no tensor of values: answered as they are."""

FOLLOWED = {"register_hook", "deepcopy", "as_subclass", "grad"}
"""Those after which something of the samples must be kept track of."""


READING = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.__complex__, Tensor.__dlpack__, Tensor.__contains__, Tensor.is_nonzero, Tensor.equal, Tensor.allclose,
    Tensor.__repr__, Tensor.__format__,
    torch.is_nonzero, torch.equal, torch.allclose,
}  # fmt: skip
"""Functions that give values of a tensor to Python."""


SIZES = set("shape size len numel nelement nbytes stride".split())
"""Questions whose answers are numbers that follow the values, for tensors that were cut to size by values."""

SIZED_BY_VALUES = set("nonzero argwhere masked_select unique unique_consecutive bincount repeat_interleave".split())
"""Ops whose results have as many rows as values say."""


FACTORIES = set("arange empty eye full linspace ones rand randn zeros".split())
"""Ops that make a tensor of a size that numbers tell, or single values of tensors."""


def read_by_torch(name: str, args: tuple, kwargs: dict) -> list[Tensor]:
    """Tensors of which torch itself reads the values for the shape of a result: x[:, :lengths.max()], one_hot(y), zeros(n)."""
    if name == "getitem":
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return tensors_in([(i.start, i.stop, i.step) for i in parts if isinstance(i, slice)])
    if name == "one_hot":
        num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return tensors_in((*args, *kwargs.values())) if num_classes == -1 else []
    return tensors_in((*args, *kwargs.values())) if name in FACTORIES else []


@dataclass(frozen=True, slots=True)
class Kind:
    """What a function is."""

    name: str
    """Its `op_name`."""
    is_opaque: bool
    """Whether it is in OPAQUE."""
    is_question: bool
    """Whether it is opaque and needs no thought at all."""
    is_reading: bool
    """Whether it is in READING."""
    asks_size: bool
    """Whether it is in SIZES."""
    has_inside: bool
    """Whether it is a function of torch written in Python, which is looked into."""
    is_alike: bool
    """Whether a call like one before need not be understood again, or what it calls need not."""
    is_higher: bool
    """Whether it is a higher-order op, which is given functions."""


@lru_cache(maxsize=4096)
def kind_of(func: Callable) -> Kind:
    """What the function is."""
    name = op_name(func)
    is_opaque = name in OPAQUE and func not in ENGINE
    is_reading = func in READING
    is_question = is_opaque and name not in FOLLOWED and not is_reading
    has_inside = without_override(func) is not None and func not in ENGINE
    is_alike = not is_opaque and (has_inside or flows_by_shapes(name))
    asks_size, is_higher = is_opaque and name in SIZES, isinstance(func, HigherOrderOperator)
    return Kind(name, is_opaque, is_question, is_reading, asks_size, has_inside, is_alike, is_higher)
