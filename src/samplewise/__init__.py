"""The gradient of every sample in a batch, for any PyTorch model, and answers about them without building them."""

from samplewise.errors import SamplesMixError, SamplewiseError, UnattributedError
from samplewise.expanded_weights import call_for_per_sample_grads
from samplewise.queries import Grads, capture
from samplewise.verification import Verification, verify

__version__ = "0.1.0"
__all__ = [
    "Grads",
    "SamplesMixError",
    "SamplewiseError",
    "UnattributedError",
    "Verification",
    "call_for_per_sample_grads",
    "capture",
    "verify",
]
