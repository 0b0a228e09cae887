"""Graphs that are walked more than once keep what they saved."""

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from samplewise.errors import UnattributedError


def kept_as_is() -> saved_tensors_hooks:
    """Inside, what ops save for backward is kept as it is, also where the model around them is checkpointed.

    With hooks autograd leaves the check for changes in place to them, so they make it.
    """
    return saved_tensors_hooks(lambda t: (t.detach(), t._version), _unchanged)


def _unchanged(packed: tuple[Tensor, int]) -> Tensor:
    t, version = packed
    if t._version != version:
        raise UnattributedError(
            f"a tensor {tuple(t.shape)} was changed in place (a parameter by an optimizer's step?) after a value was computed "
            "from it that gradients are pulled back through. Ask before changing it."
        )
    return t
