"""Products of tensors written as an einsum: one letter a dimension."""

import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

BATCH_LETTERS = "abcdefgh"


@dataclass(frozen=True)
class Contraction:
    """The letters of each operand and of the result; a letter that the result does not have is summed over."""

    terms: tuple[str, ...]
    out: str


def matmul_letters(left: Tensor, right: Tensor) -> Contraction:
    """The letters of `left @ right`.

    >>> import torch
    >>> matmul_letters(torch.zeros(5, 2, 3), torch.zeros(3, 4))
    Contraction(terms=('aij', 'jk'), out='aik')
    """
    return _matmul_letters(left.ndim, right.ndim)


@cache
def _matmul_letters(left: int, right: int) -> Contraction:
    i, k = "i" if left > 1 else "", "k" if right > 1 else ""
    num_batch = max(left, right, 2) - 2
    batch = BATCH_LETTERS[:num_batch]
    of_left, of_right = (batch[num_batch - max(0, ndim - 2) :] for ndim in (left, right))
    return Contraction((f"{of_left}{i}j", f"{of_right}j{k}"), f"{batch}{i}{k}")


def linear_letters(x: Tensor, weight: Tensor) -> Contraction:
    """The letters of `F.linear(x, weight)`."""
    lead, k = BATCH_LETTERS[: x.ndim - 1], "k" if weight.ndim == 2 else ""
    return Contraction((f"{lead}j", f"{k}j"), f"{lead}{k}")


def einsum_letters(equation: str, *tensors: Tensor) -> Contraction | None:
    """The letters of an einsum with its ellipsis spelt out; None where a letter repeats in one term.

    >>> import torch
    >>> einsum_letters("...i,oi->...o", torch.zeros(2, 5, 3), torch.zeros(4, 3))
    Contraction(terms=('BAi', 'oi'), out='BAo')
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    terms, widest = [], ""
    for term, operand in zip(inputs.split(","), tensors, strict=True):
        dots = "".join(reversed(free[: operand.ndim - len(term.replace("...", ""))]))  # aligned on the right
        widest = max(widest, dots, key=len)
        terms.append(term.replace("...", dots))
    if not arrow:
        once = sorted(c for c in set(inputs) - set(".,") if inputs.count(c) == 1)
        out = "..." + "".join(once)
    out = out.replace("...", widest)
    if any(len(set(term)) != len(term) for term in [*terms, out]):
        return None
    return Contraction(tuple(terms), out)


@cache
def tensordot_letters(left: int, right: int, of_left: tuple[int, ...], of_right: tuple[int, ...]) -> Contraction:
    """The letters of a product of tensors of so many dimensions over these of each.

    >>> tensordot_letters(3, 2, (2,), (0,))
    Contraction(terms=('abc', 'ce'), out='abe')
    """
    letters = string.ascii_lowercase
    first, second = letters[:left], list(letters[left : left + right])
    for d, other in zip(of_left, of_right, strict=True):
        second[other] = first[d]
    summed = {first[d] for d in of_left}
    return Contraction((first, "".join(second)), "".join(c for c in [*first, *second] if c not in summed))


OPERANDS: dict[str, tuple[int, str, str]] = {
    # where the first factor stands, and the keywords of the two
    "matmul": (0, "input", "other"),
    "mm": (0, "input", "mat2"),
    "sparse_mm": (0, "mat1", "mat2"),
    "bmm": (0, "input", "mat2"),
    "mv": (0, "input", "vec"),
    "addmm": (1, "mat1", "mat2"),
    "sparse_addmm": (1, "mat1", "mat2"),
    "addmv": (1, "mat", "vec"),
    "baddbmm": (1, "batch1", "batch2"),
    "linear": (0, "input", "weight"),
    "inner": (0, "input", "other"),
    "tensordot": (0, "a", "b"),
}


def operands(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Contraction, list[Tensor]] | None:
    """The letters of what the op called `name` multiplies, and the tensors; None if it has no such form."""
    if name == "einsum":
        tensors = list(args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:])
        letters = einsum_letters(args[0], *tensors) if isinstance(args[0], str) else None
        return None if letters is None else (letters, tensors)
    if name == "sparse_mm" and len(args) + len(kwargs) > 2:  # it reduces by something else than a sum
        return None
    at, *keywords = OPERANDS[name]
    tensors = [args[at + i] if len(args) > at + i else kwargs[keyword] for i, keyword in enumerate(keywords)]
    if name in ("inner", "tensordot"):
        dims = args[2:] or kwargs.get("dims", 2)  # torch's own call gives those of each, one after the other
        letters = _letters_over([[-1], [-1]] if name == "inner" else dims, *tensors)
        return None if letters is None else (letters, tensors)
    letters_of: Callable[[Tensor, Tensor], Contraction] = linear_letters if name == "linear" else matmul_letters
    return letters_of(*tensors), tensors


def _letters_over(dims: Any, left: Tensor, right: Tensor) -> Contraction | None:
    """The letters of a product over the last dimensions of one tensor and the first of the other, or over those given of each."""
    if isinstance(dims, Tensor) or not (left.ndim and right.ndim):
        return None
    dims = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    of_left, of_right = (tuple(d % t.ndim for d in ds) for ds, t in zip(dims, (left, right), strict=True))
    return tensordot_letters(left.ndim, right.ndim, of_left, of_right)


def in_order(t: Tensor, letters: str, order: str) -> Tensor:
    """`t` with its dimensions in the given order of letters."""
    return t.permute([letters.index(c) for c in order]) if letters != order else t


def along(ids: Tensor, letters: str, target: str) -> Tensor:
    """Ids of a tensor with dimensions `letters`, as ids of one with dimensions `target` (size 1 for what is new)."""
    present = "".join(c for c in target if c in letters)
    gone = "".join(c for c in letters if c not in target)
    ids = in_order(ids, letters, present + gone)
    sizes = dict(zip(present, ids.shape, strict=False))
    return ids.reshape([sizes.get(c, 1) for c in target])
