"""Where the compiler is told to keep and lay results changes no number and no batch, whatever writes to memory around them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from stepping import both, error
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import samplewise as sw
from samplewise.compiled import hints
from samplewise.compiled.placing import KEPT, LAID
from samplewise.compiled.writes import GIVEN, last_writes, memory_of, root_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated")


class Tokens(nn.Module):
    """Tokens read as an image, and a masked copy of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.conv, self.head = nn.Linear(5, 4), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        y = self.conv(h.transpose(1, 2).view(-1, 4, 3, 3))
        masked = h.clone()
        masked[:, torch.tensor([1, 2])] = 0
        return self.head(masked) + y.flatten(2).mean(2)[:, None, :3]


class Cutout(nn.Module):
    """A frozen convolution of the batch, and one of a copy of it that is cut out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(channels, 4, 3, padding=1).requires_grad_(False)
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y, cut = self.frozen(x), x.clone()
        cut[:, :, 1:3] = 0
        return 2 * y + self.conv(cut)


class Copied(nn.Module):
    """A copy that a product and a sum read before it is written to."""

    def __init__(self, is_of_batch: bool) -> None:
        super().__init__()
        self.is_of_batch, self.first, self.second = is_of_batch, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.is_of_batch else self.first(x)
        copied = h.clone()
        y = F.linear(copied, self.second.weight.detach()) + copied.sum(1, keepdim=True)
        place = (torch.arange(len(x))[:, None], torch.tensor([[0]]))
        changed = copied.index_put(place, torch.zeros((), dtype=x.dtype))
        return y + self.second(changed) + h


class WrittenThroughItsRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.conv, self.head = nn.Linear(5, 36), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(36, 3)
        self.conv.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        image = h.view(-1, 4, 3, 3)
        image.mul_(2)
        with torch.no_grad():
            y = self.conv(image)
        h.add_(1)  # the image too
        return self.head((image + y).flatten(1))


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False), nn.Linear(36, 3)
        self.register_buffer("image", torch.randn(1, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        image = self.image[:]
        y = self.conv(image)
        self.image.add_(1)
        return self.head(x * (y + image).flatten())


class NormThen(nn.Module):
    """A group norm whose gradient does not lie as its input does."""

    def __init__(self, then: nn.Module, order: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.norm, self.then, self.order = nn.Linear(5, 64), nn.GroupNorm(2, 4), then, order

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.norm(self.inner(x).view(-1, 4, 4, 4)).permute(self.order))


LAST = torch.channels_last
CASES = {
    "tokens": lambda: (Tokens(), torch.randn(3, 9, 5)),
    "one channel": lambda: (Cutout(1), torch.randn(3, 1, 5, 5)),
    "channels last": lambda: (Cutout(3), torch.randn(3, 3, 5, 5).to(memory_format=LAST)),
    "copied batch": lambda: (Copied(True), torch.randn(3, 6)),
    "copied inside": lambda: (Copied(False), torch.randn(3, 6)),
    "written through its root": lambda: (WrittenThroughItsRoot(), torch.randn(3, 5)),
    "buffer": lambda: (Buffer(), torch.randn(3, 36)),
    "norm, then permuted": lambda: (NormThen(nn.Linear(4, 3), (0, 2, 3, 1)), torch.randn(3, 5)),
    "norm, then channels last": lambda: (
        NormThen(nn.Conv2d(4, 4, 3).to(memory_format=LAST), (0, 1, 2, 3)),
        torch.randn(3, 5),
    ),
}


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def ask(grads: sw.Grads) -> tuple:
    return grads.norms(), grads.clipped_sum(max_norm=0.1), grads.materialize()


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_what_is_placed_has_its_values(make, monkeypatch):
    monkeypatch.setattr(hints, "LARGE", 1)
    model, x = make()
    in_double, before = copy.deepcopy(model).double(), x.clone()
    compiled, _ = both(model, square, ask)
    truth = sw.per_sample_step(in_double, square, ask)
    for k in (1.0, 2.0):  # the second batch in the same memory
        x.copy_(before * k)
        assert error(compiled(x), truth(x.double())) < 1e-5
        assert torch.equal(x, before * k)
    assert not compiled.num_op_by_op


@pytest.mark.parametrize("op", [lambda t: KEPT(t), lambda t: LAID(t, True)], ids=["kept", "laid"])
def test_what_a_graph_gives_is_its_own(op):
    """Not the memory that it was given, nor that of another result: callers may write to either."""

    @torch.compile(fullgraph=True)
    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x.sin()
        return op(x), op(h), h

    hints.tell_the_compiler()
    x = torch.randn(2, 3, 4, 5).to(memory_format=LAST)
    results = run(x)
    assert len({t.data_ptr() for t in (x, *results)}) == 4
    torch.testing.assert_close(results, (x, x.sin(), x.sin()))


def test_roots_are_found_through_views_writes_and_lists():
    def run(x: Tensor) -> Tensor:
        h = x.sin()
        first, second = h.view(2, 6).mul_(2).split(3, 1)
        torch.add(first, 1, out=second.squeeze_(-1))
        return h.add_(1) + x.cos()

    nodes = list(make_fx(run)(torch.randn(3, 4)).graph.nodes)
    given, sin, *aliases, cos, _, _ = nodes
    assert (sin.target, cos.target) == (torch.ops.aten.sin.default, torch.ops.aten.cos.default)
    assert len(aliases) >= 6 and {root_of(node) for node in aliases} == {sin}
    assert last_writes(sin.graph) == {sin: nodes.index(aliases[-1])}
    assert memory_of(given) is GIVEN
