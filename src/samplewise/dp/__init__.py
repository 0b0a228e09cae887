"""Private training: an ordinary loop whose steps are clipped sums of per-sample gradients with noise, and accounted.

The way of a step: the loader draws each sample with the same probability (`sampling`, `loader`) → the model's forward opens a
capture and backward fills it (`session`) → each sample's gradient is bounded (`clipping`, `adaptive`) → noise is added once a
draw (`noise`) → the step is written down (`privacy`, `accounting`) → the user's own optimizer moves the parameters (`optimizer`).
`make_private` puts them together. docs/privacy.md says what is promised and what is not.
"""

from samplewise.dp.accounting import Accountant, Steps, epsilon, noise_multiplier_for
from samplewise.dp.adaptive import Adaptive, sum_noise_multiplier
from samplewise.dp.clipping import Automatic, Clipped, clip_weights, clipped
from samplewise.dp.loader import PoissonLoader
from samplewise.dp.noise import Noise, noise_stds
from samplewise.dp.optimizer import PrivateOptimizer
from samplewise.dp.private import make_private
from samplewise.dp.sampling import poisson_sample
from samplewise.dp.validation import Change, Problem, fix, validate

__all__ = [
    "Accountant",
    "Adaptive",
    "Automatic",
    "Change",
    "Clipped",
    "Noise",
    "PoissonLoader",
    "PrivateOptimizer",
    "Problem",
    "Steps",
    "clip_weights",
    "clipped",
    "epsilon",
    "fix",
    "make_private",
    "noise_multiplier_for",
    "noise_stds",
    "poisson_sample",
    "sum_noise_multiplier",
    "validate",
]
