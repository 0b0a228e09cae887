"""The gradient of every sample in a batch, for any PyTorch model, and answers about them without building them.

The way of the data: the model is called inside `capture` → each op is seen (`intercept`) → where a parameter meets data, the
op's rule (`ops`) runs it without a weight gradient and says how the gradient of its result becomes a factor (`factors`) →
which rows belong to which sample is known from marks that follow the ops (`samples`, `flow`) → backward hands the gradient over
(`tap`) → values computed from parameters alone are pulled back (`weights`) → the factors of one parameter are joined and
asked (`queries`). The first call of its kind is checked against samples run alone (`verification`).
"""

from samplewise import dp
from samplewise.errors import SamplesMixError, SamplewiseError, UnattributedError
from samplewise.expanded_weights import call_for_per_sample_grads
from samplewise.noise import NoiseScale
from samplewise.opening import capture, per_sample
from samplewise.projections import Gaussian, Kronecker, Rademacher, SparseJL
from samplewise.queries import Grads
from samplewise.running import RunningMoments, RunningNoiseScale, RunningNorms
from samplewise.step import StepResult, per_sample_step
from samplewise.verification import verify
from samplewise.verification.table import Verification

__version__ = "0.1.0"
__all__ = [
    "Gaussian",
    "Grads",
    "Kronecker",
    "NoiseScale",
    "Rademacher",
    "RunningMoments",
    "RunningNoiseScale",
    "RunningNorms",
    "SamplesMixError",
    "SamplewiseError",
    "SparseJL",
    "StepResult",
    "UnattributedError",
    "Verification",
    "call_for_per_sample_grads",
    "capture",
    "dp",
    "per_sample",
    "per_sample_step",
    "verify",
]
