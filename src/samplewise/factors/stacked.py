"""Norms of layers alike, taken side by side: one op instead of one each."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from samplewise.factors.base import Factor, Hasty
from samplewise.factors.outer import Outer
from samplewise.plan import CHUNK_BYTES

SHARE = 8
"""A layer is stacked whose a and g take at most this part of what a query may build at once: larger ones keep a device busy."""


class Stack:
    """The factors G_l[b] = sum_t g_l[b,t] ⊗ a_l[b,t] of L weights of one shape.

    a and g are copied side by side for one question and dropped after it; a stack holds at most `plan.CHUNK_BYTES`.
    """

    def __init__(self, factors: Mapping[str, Outer]):
        self._factors = dict(factors)
        self.first, self._first = next(iter(factors.items()))
        self.device = self._first.g.device

    def hasty_sq_norms(self, route: str | None) -> Hasty:
        """n with n[l·B + b] = |G_l[b]|², shape [L·B]: the norms of so many samples of one weight."""
        a, g = (torch.cat(parts) for parts in zip(*(f.tensors() for f in self._factors.values()), strict=True))
        return self._first.of(a, g).hasty_sq_norms(route)

    def added(self, n: Tensor) -> Tensor:
        """sum_l n[l·B + b], shape [B]."""
        return n.reshape(len(self._factors), -1).sum(0)


def stacks(factors: Mapping[str, Factor], asked: Mapping[str, Any]) -> tuple[list[Stack], dict[str, Factor]]:
    """The factors that are alike, and asked alike, in stacks; and the others."""
    alike: dict[Any, dict[str, Outer]] = {}
    for name, factor in factors.items():
        if type(factor) is Outer and (form := factor.form) is not None:
            alike.setdefault((form, asked[name]), {})[name] = factor
    found = [part for group in alike.values() for part in _fitting(group) if len(part) > 1]
    names = {name for part in found for name in part}
    return [Stack(part) for part in found], {name: f for name, f in factors.items() if name not in names}


def _fitting(group: dict[str, Outer]) -> Iterator[dict[str, Outer]]:
    """The group cut into parts that fit, even ones; nothing if its layers are large."""
    first = next(iter(group.values()))
    limit = CHUNK_BYTES.get(first.g.device.type, CHUNK_BYTES["cuda"])
    num_bytes = max(1, first.a.nbytes + first.g.nbytes)
    if not first.g.is_cuda:  # where half precision is taken as float32
        num_bytes = num_bytes * max(4, first.g.element_size()) // first.g.element_size()
    if num_bytes * SHARE > limit:
        return
    num_parts = math.ceil(len(group) / (limit // num_bytes))
    size = math.ceil(len(group) / num_parts)
    items = list(group.items())
    for start in range(0, len(items), size):
        yield dict(items[start : start + size])
