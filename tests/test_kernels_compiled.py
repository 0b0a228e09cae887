"""Every kernel compiled for an H200, on a machine without: the interpreter takes code that the compiler or the device refuses."""

import pytest
import torch

from samplewise.kernels import conv_gram_norm, conv_norm, depthwise, direct_norm, gram_norm
from samplewise.kernels.backend import HAS_TRITON, IS_INTERPRETED

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or IS_INTERPRETED or torch.cuda.is_available(), reason="needs Triton's compiler, and no GPU of its own"
)

SHARED_BYTES = 227 * 1024
"""What one program may have of shared memory on compute capability 9.0."""
NUM_PROCESSORS = 132
DTYPES = (torch.bfloat16, torch.float32)


class H200:
    """What Triton asks of a driver to compile."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """What is launched is compiled, and collected here."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels = []

    def launcher(kernel, grid):
        def launch(*args, **options):
            kernels.append(kernel.warmup(*args, grid=grid, **options))

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    for module in (gram_norm, conv_norm, depthwise):
        monkeypatch.setattr(module, "num_processors", lambda t: NUM_PROCESSORS)
    monkeypatch.setattr(driver, "_active", H200())
    return kernels


def empty(*shape: int, dtype: torch.dtype, last: bool = False) -> torch.Tensor:
    t = torch.empty(*shape, dtype=dtype, device="meta")
    return t.contiguous(memory_format=torch.channels_last) if last else t


def check(kernels: list) -> None:
    """Each has the memory that it needs."""
    assert kernels
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_BYTES, (kernel.metadata.name, kernel.metadata.shared)


POSITIONS = [(16, 256, 768, 2304), (16, 256, 768, 50257), (8, 1024, 768, 3072), (3, 17, 5, 7), (2, 1, 3, 5)]
"""(B, T, I, O)"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", POSITIONS)
@pytest.mark.parametrize("module", [gram_norm, direct_norm], ids=["gram", "direct"])
def test_norms(module, shape, dtype, compiled):
    B, T, I, O = shape
    a, g = empty(B, T, I, dtype=dtype), empty(B, T, O, dtype=dtype)
    module.launch(a, g, module.config(a, g))
    check(compiled)


IMAGES = [
    ((256, 64, 32, 32), (256, 64, 32, 32), (3, 1, 1, 1), 1),
    ((256, 256, 8, 8), (256, 512, 4, 4), (3, 2, 1, 1), 1),
    ((32, 3, 224, 224), (32, 64, 112, 112), (7, 2, 3, 1), 1),
    ((2, 6, 9, 9), (2, 4, 7, 7), (3, 1, 1, 2), 2),
]
"""The image, the gradient of the result, (kernel, stride, padding, dilation), groups."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("images", IMAGES)
def test_convolutions(images, last, dtype, compiled):
    of_x, of_g, geometry, groups = images
    x, g = (empty(*shape, dtype=dtype, last=last) for shape in (of_x, of_g))
    kernel, *rest = [[n, n] for n in geometry]
    cut = conv_norm.config(x, g, kernel, groups)
    conv_norm.launch(x, g, kernel, *rest, groups, cut)
    conv_norm.launch(x, g, kernel, *rest, groups, cut, conv_norm._empty_gradients(x, g, kernel, groups))
    conv_gram_norm.launch(x, g, kernel, *rest, groups, conv_gram_norm.config(g))
    check(compiled)


CHANNELS = [((32, 96, 56, 56), (32, 96, 56, 56), (7, 1, 3, 1)), ((2, 3, 9, 9), (2, 6, 5, 5), (3, 2, 1, 1))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("images", CHANNELS)
def test_depthwise(images, last, dtype, compiled):
    of_x, of_g, geometry = images
    x, g = (empty(*shape, dtype=dtype, last=last) for shape in (of_x, of_g))
    kernel, *rest = [[n, n] for n in geometry]
    depthwise.launch(x, g, kernel, *rest, depthwise.config(g, kernel))
    check(compiled)
