"""The end of a capture that opened in one place of a program and ends in another, whatever was opened in between."""

from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from samplewise.errors import SamplewiseError
from samplewise.queries import Grads


def close(grads: Grads) -> None:
    """Ends the capture, and leaves modes that were entered since (a `torch.device` block) as they are."""
    mode, above = grads._intercept, []
    was_open = mode in _get_current_function_mode_stack()
    if was_open:
        while _get_current_function_mode_stack()[-1] is not mode:
            above.append(_pop_mode())
    else:
        _push_mode(mode)
    grads.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)
    if not was_open:
        raise SamplewiseError(
            "a block that changes torch functions (with torch.device(...), a TorchFunctionMode) was left between the model's "
            "forward and step(). Put forward, backward and step into the same block."
        )
