"""Functions of which no mode hears: questions asked inside a block are none of the model's business."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def unwatched(function: Callable[P, R]) -> Callable[P, R]:
    """The function, its ops told to no mode of this thread.

    A clipped sum of GPT-2's 148 parameters asked inside the block took 40 ms of Python where it takes 6 (Xeon).
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run
