"""The case table, backward's own threads and mixed precision on a CUDA device; run with `make test-gpu`."""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from cases import ALL
from test_queries import QUERIES
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import samplewise as sw
from samplewise.compiled import parts, replay
from samplewise.projections import hash_keys, hashes
from samplewise.testing import oracle, relative_error, relative_errors, run_capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def _on_the_gpu():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device("cpu")


@pytest.mark.parametrize("case", ALL)
def test_case_on_the_gpu(case):
    model, batch, loss_fn = case.build()
    model, batch = model.cuda(), tree_map_only(Tensor, lambda t: t.cuda(), batch)
    grads = run_capture(model, loss_fn, *batch, **case.options)
    truth = oracle(model, loss_fn, *batch, batch_dim=case.batch_dim)
    truth = {name: truth[name] for name in grads}
    w = torch.randn(grads.batch_size, dtype=torch.float64)
    for query in QUERIES:
        got, expected = query(grads, truth, w)
        assert got.keys() == expected.keys()
        assert max(relative_errors(got, expected).values(), default=0.0) < 1e-9, query.__name__


def test_entries_of_projections_are_those_of_the_cpu():
    keys, elements = hash_keys(3, "weight"), torch.cat([torch.arange(100_000), torch.arange(100) + 2**40])
    assert torch.equal(hashes(elements, keys, num_words=7).cpu(), hashes(elements.cpu(), keys, num_words=7))
    for projector in (sw.Rademacher(100), sw.Gaussian(100)):
        assert torch.equal(projector.entries(elements, keys).cpu(), projector.entries(elements.cpu(), keys))
    for here, there in zip(
        sw.SparseJL(100).nonzeros(elements, keys), sw.SparseJL(100).nonzeros(elements.cpu(), keys), strict=True
    ):
        assert torch.equal(here.cpu(), there)
    assert torch.equal(sw.Kronecker(9, 9).side("w", "in", 1000, elements.device).cpu(),
                       sw.Kronecker(9, 9).side("w", "in", 1000, torch.device("cpu")))  # fmt: skip


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)), nn.Linear(4, 2)
        self.how = how

    def forward(self, x):
        h = self.a(x)
        if self.how is None:
            return self.c(self.b(h).tanh())
        reentrant = "not" not in self.how
        part = self.b if "nested" not in self.how else lambda h: checkpoint(self.b, h, use_reentrant=reentrant) * 2 / 2
        return self.c(checkpoint(part, h, use_reentrant=reentrant).tanh())


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "nested reentrant", "nested not reentrant"])
def test_checkpoint_recomputed_by_backwards_own_thread(how):
    model, x = Block(how).double(), torch.randn(4, 3, dtype=torch.float64)

    def loss_fn(model, x):
        return model(x).square().sum(1)

    grads = run_capture(model, loss_fn, x)
    model.how = None
    for name, G in oracle(model, loss_fn, x).items():
        assert relative_error(grads[name].materialize(), G) < 1e-9, name


@pytest.mark.parametrize("compile", [False, True])
def test_convolutions_that_torch_rounds_pass_the_check(compile):
    """torch's default is TF32, by which a sample of a deep network alone and in a batch differ by more than float32 would."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(norm_layer=lambda width: nn.GroupNorm(32, width), num_classes=10)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    loss_fn = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
    norms = sw.per_sample_step(model, loss_fn, lambda grads: grads.norms(), compile=compile)(x, y).answer
    truth = torch.stack([G.flatten(1).norm(dim=1) for G in oracle(model, loss_fn, x, y).values()]).norm(dim=0)
    assert relative_error(norms, truth) < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_precision(dtype):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 16))
    x = torch.randn(8, 50, 64)
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32), sw.capture(model) as grads:
        losses = model(x).float().square().mean((1, 2))
        grads.backward(losses)
    truth = oracle(model, lambda m, x: m(x).square().mean((1, 2)), x)
    for name, G in truth.items():
        # tf32 is off; bfloat16 keeps 8 bits of each product
        assert relative_error(grads[name].norms(), G.flatten(1).norm(dim=1)) < (1e-4 if dtype is torch.float32 else 3e-2), (
            name
        )


def test_one_step_frees_its_memory():
    model, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), torch.randn(64, 32, 512)
    gc.collect()  # what earlier tests left, which would be freed meanwhile
    held = []
    for _ in range(3):
        grads = run_capture(model, lambda m, x: m(x).square().sum((1, 2)), x)
        grads.clipped_sum(max_norm=1.0)
        del grads
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.flatten(0, -2).T @ g.flatten(0, -2)


@pytest.mark.parametrize("how", ["function", "compiled"])
def test_code_that_a_mode_does_not_see(how):
    first, w = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 5))
    model = nn.ParameterDict({"w": w})
    model.first = torch.compile(first) if how == "compiled" else first
    model = model.double()

    def loss_fn(model, x):
        h = model.first(x).tanh()
        return (Product.apply(h, model["w"]) if how == "function" else h @ model["w"]).square().sum((1, 2))

    x = torch.randn(4, 6, 3, dtype=torch.float64)
    with sw.capture(model, batch_size=4) as grads:
        grads.backward(loss_fn(model, grads.mark(x)))
    for name, G in oracle(model, loss_fn, x).items():
        assert relative_error(grads[name].materialize(), G) < 1e-9, name


def test_gradient_hooks_run_by_backwards_own_thread_are_followed():
    model, x = nn.Linear(3, 4), torch.randn(4, 3)
    for hook, refused in ((lambda g: g * 2, False), (lambda g: g / g.norm(), True)):
        with sw.capture(model, verify=False) as grads:
            z = model(x)
            z.register_hook(hook)
            if refused:
                with pytest.raises(sw.SamplesMixError, match="gradient hook"):
                    grads.backward(z.square().sum(1))
            else:
                grads.backward(z.square().sum(1))


class Packed(nn.Module):
    """Attention over packed sequences, kept apart by their ends."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 8)

    def forward(self, x, ends, longest):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 64)).unbind(1)
        return self.out(varlen_attn(q, k, v, ends, ends, longest, longest).flatten(1))


def test_packed_sequences_by_their_ends():
    model, lengths = Packed().bfloat16(), [5, 9, 2]
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    with sw.capture(model, sample_ids=ids, verify=False) as grads:
        model(x, ends, 9).float().square().sum().backward()
    for b, part in enumerate(x.split(lengths)):
        model.zero_grad()
        model(part, torch.tensor([0, len(part)], dtype=torch.int32), len(part)).float().square().sum().backward()
        for name, p in model.named_parameters():
            assert relative_error(grads[name].of_samples([b])[0].double(), p.grad.double()) < 3e-2, name  # bfloat16
    with pytest.raises(sw.SamplesMixError), sw.capture(model, sample_ids=ids, verify=False):
        model(x, torch.tensor([0, 7, 16], dtype=torch.int32), 9)


# --- compiled steps ---------------------------------------------------------------------------------------------------


def _classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5)).cuda()


def _losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(len(x), -1).sum(1)


def _answers(grads: sw.Grads) -> tuple:
    return grads.norms(), grads.clipped_sum(max_norm=0.5)


def test_compiled_step_is_recorded_and_follows_the_parameters():
    """Optimizer steps, parameters that move, and results of earlier steps that are still held."""
    model = _classifier()
    step, eager = (sw.per_sample_step(model, _losses, _answers, compile=c) for c in (True, False))
    optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), []
    for k in range(6):
        x, y = torch.randn(16, 7, 24), torch.randint(5, (16, 7))
        got, want = step(x, y), eager(x, y)
        held.append((got, want))
        for (norms, sums), (true_norms, true_sums) in [(g.answer, w.answer) for g, w in held]:
            assert relative_error(norms, true_norms.double()) < 1e-4
            for name in true_sums:
                assert relative_error(sums[name], true_sums[name].double()) < 1e-3  # float32 through tf32x3
        for name, p in model.named_parameters():
            p.grad = want.answer[1][name]
        optimizer.step()
        if k == 3:
            model[0].weight.data = model[0].weight.data.clone()
    assert step.num_graphs == 1


def test_compiled_step_of_many_sizes_and_of_a_sample_that_is_not_finite():
    model = _classifier()
    step, eager = (sw.per_sample_step(model, _losses, _answers, compile=c) for c in (True, False))
    for B in (8, 12, 5, 31, 2, 64):
        x, y = torch.randn(B, 7, 24), torch.randint(5, (B, 7))
        x[0, 0, 0] = float("inf") if B == 31 else 0.0
        got, want = step(x, y).answer, eager(x, y).answer
        assert torch.equal(got[0].isfinite(), want[0].isfinite())
        for name in want[1]:
            assert relative_error(got[1][name], want[1][name].double()) < 1e-3
    assert step.num_graphs == 2


def test_compiled_convolutions_in_half_precision():
    """Images that the graph turns, and kernels that take them as they lie."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(inplace=True), nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5),
    ).to("cuda", torch.bfloat16)  # fmt: skip
    x, y = torch.randn(12, 16, 20, 20).bfloat16(), torch.randint(5, (12,))
    losses = lambda model, x, y: nn.functional.cross_entropy(model(x).float(), y, reduction="none")
    got = sw.per_sample_step(model, losses, _answers, compile=True)(x, y).answer
    want = sw.per_sample_step(model, losses, _answers)(x, y).answer
    assert relative_error(got[0], want[0].double()) < 0.02
    for name, p in model.named_parameters():
        assert relative_error(got[1][name], want[1][name].double()) < 0.05
        assert got[1][name].stride() == p.stride()


def _tied_words() -> tuple[nn.Module, Any, list[tuple[Tensor, ...]]]:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.inner = nn.Embedding(300, 64), nn.Linear(64, 64)

        def forward(self, ids_BT):
            return F.linear(self.inner(self.words(ids_BT)).relu_(), self.words.weight)

    losses = lambda model, ids: (
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape).sum(1)
    )
    return Tied(), losses, [(torch.randint(300, (6, 5)),) for _ in range(4)]


def _images() -> tuple[nn.Module, Any, list[tuple[Tensor, ...]]]:
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(inplace=True), nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(inplace=True), nn.Conv2d(64, 128, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip
    losses = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")
    return model, losses, [(torch.randn(6, 16, 12, 12), torch.randint(5, (6,))) for _ in range(4)]


@pytest.mark.parametrize("make", [_tied_words, _images])
def test_gradients_of_every_sample_are_made_after_the_recording(make, monkeypatch):
    """What a step gives stays when later ones write into the memory that it was made of."""
    monkeypatch.setattr(parts, "SMALL_BYTES", 100_000)
    torch.manual_seed(0)
    model, losses, batches = make()
    step = sw.per_sample_step(model.double(), losses, lambda grads: grads.materialize(), compile=True)
    batches = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in batches]
    answers = [step(*batch).answer for batch in batches]
    assert step.num_graphs == step.num_recordings == 1 and step.num_op_by_op == 0
    for batch, answer in zip(batches, answers, strict=True):
        for name, G in oracle(model, losses, *batch).items():
            assert relative_error(answer[name], G) < 1e-9, name


def test_a_recording_is_cut_from_one_block_with_few_holes():
    x = torch.randn(1 << 20)

    def run(x: Tensor) -> list[Tensor]:
        held = [x.repeat(k) + 1 for k in (3, 7, 2, 11, 5)]
        del held[1::2]
        held += [x.repeat(k) * 2 for k in (4, 6, 9)]
        small = [x[: 1 << 18] * k for k in range(64)]  # 64 MB in segments of small tensors
        return [torch.stack([t.sum() for t in (*held, *small)]), x[::2], x[:1].expand(3)]

    expected = run(x)
    first = replay.Recording(run, [x], [], None).num_bytes()
    recording = replay._compact(lambda num_bytes: replay.Recording(run, [x], [], None, num_bytes))
    assert recording.num_bytes() <= first
    for got, want in zip(recording((x,)), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_recordings_of_many_sizes_share_their_memory():
    """Sizes come in any order and several times, larger ones late, on two streams; results of earlier steps stay."""
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64))
    losses = lambda model, x: model(x).square().sum(1)
    step, eager = (sw.per_sample_step(model, losses, _answers, compile=c) for c in (True, False))
    sizes, side = [64, 96, 2048, 2048, 64, 64, 96, 2048, 4096, 4096, 64, 96, 2048, 64, 4096, 96], torch.cuda.Stream()
    batches = [torch.randn(B, 256) for B in sizes]
    torch.cuda.synchronize()
    answers = []
    for k, x in enumerate(batches):
        with torch.cuda.stream(side if k % 3 == 2 else torch.cuda.current_stream()):
            answers.append(step(x).answer)
    torch.cuda.synchronize()
    for x, (norms, total) in zip(batches, answers, strict=True):
        want_norms, want_total = eager(x).answer
        assert relative_error(norms, want_norms.double()) < 1e-3
        for name in total:
            assert relative_error(total[name], want_total[name].double()) < 1e-3, (len(x), name)
    recorder = step._recorder
    assert step.num_recordings == 4 and len({recording.pool for recording in recorder._all()}) == 1
    alone = sw.per_sample_step(model, losses, _answers, compile=True)
    for _ in range(2):
        alone(batches[8])
    assert recorder.num_bytes <= 1.2 * alone._recorder.num_bytes + replay.SMALL_BYTES


def test_a_step_that_cannot_be_recorded_is_taken_as_it_is(monkeypatch):
    """Nothing is lost where memory ends during a recording, where recordings keep too much, or where parameters keep moving."""
    x, w = torch.randn(5, 4), torch.randn(4, 4)
    graph = make_fx(lambda x: [(x @ w).sin()])(x)
    modes = []

    def step(x: Tensor) -> list[Tensor]:
        modes.append(torch.cuda.is_current_stream_capturing())
        if modes[-1]:
            trouble()
        return graph(x)

    trouble = lambda: None
    for each, num_tries in ((lambda: torch.empty(1 << 50, dtype=torch.int8), replay.MAX_TRIES), (lambda: x.sum().item(), 1)):
        trouble = each
        run = replay.Recorder().recorded(step, graph)
        modes.clear()
        for _ in range(8):
            torch.testing.assert_close(run(x)[0], (x @ w).sin())
        assert sum(modes) == num_tries and modes[-1] is False
    trouble = lambda: None
    monkeypatch.setattr(replay, "MAX_SHARE", 0.0)
    run = replay.Recorder().recorded(step, graph)
    for _ in range(3):
        torch.testing.assert_close(run(x)[0], (x @ w).sin())
    assert modes[-1] is False
    monkeypatch.undo()
    run, (weight,) = replay.Recorder().recorded(step, graph), graph.buffers()
    for k in range(8):
        weight.data = torch.full((4, 4), float(k))
        torch.testing.assert_close(run(x)[0], (x @ weight).sin())
    assert modes[-1] is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("route", ["gram", "direct", "build"])
def test_routes_with_kernels_agree_in_every_precision(dtype, route):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(), nn.Conv2d(24, 32, 3, stride=2), nn.Flatten(2)
    ).to("cuda", dtype)
    head = nn.Linear(32, 7).to("cuda", dtype)
    whole = nn.ModuleDict({"body": model, "head": head})
    x = torch.randn(6, 16, 17, 17).to(dtype)

    def losses(whole: nn.Module, x: Tensor) -> Tensor:
        return whole["head"](whole["body"](x).mT).float().square().flatten(1).sum(1)

    with sw.capture(whole, plan={"*.weight": route}, batch_size=6, verify=False) as grads:
        grads.mark(x)
        grads.backward(losses(whole, x))
    truth = oracle(whole, losses, x)
    rows = {name: G.flatten(1) for name, G in truth.items()}
    tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-3}[dtype]  # forward and backward in the dtype
    norms = torch.cat(list(rows.values()), 1).norm(dim=1)
    assert relative_error(grads.norms(), norms) < tolerance
    bound = norms.median().item()
    for name, total in grads.clipped_sum(max_norm=bound).items():
        exact = torch.tensordot((bound / norms).clamp(max=1), truth[name], dims=1)
        assert relative_error(total, exact) < tolerance, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("secure", [False, True])
def test_private_training(dtype, secure):
    """The clipped sum is the oracle's, and noise has its size: 20,000 elements know it to 0.5 %, 3 % is six of those."""
    model = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 10)).to(dtype)
    rows = torch.utils.data.TensorDataset(
        torch.randn(64, 100, device="cpu").to(dtype), torch.randint(10, (64,), device="cpu")
    )

    def losses(model, x, y):
        return nn.functional.cross_entropy(model(x).float(), y, reduction="none")

    x, y = (t.cuda() for t in rows.tensors)
    G = oracle(model, losses, x, y)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in G.values()]).sum(0).sqrt()
    true = torch.einsum("b,boi->oi", (0.1 / norms).clamp(max=1), G["0.weight"]) / 64
    seen = {}
    for z in (0.0, 2.0):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(twin.parameters(), fused=True)
        loader = torch.utils.data.DataLoader(rows, batch_size=64)
        twin, optimizer, loader = sw.dp.make_private(
            twin, optimizer, loader, noise_multiplier=z, max_grad_norm=0.1, max_physical_batch_size=24, secure=secure
        )
        for xb, yb in loader:
            optimizer.zero_grad()
            losses(twin, xb.cuda(), yb.cuda()).mean().backward()
            optimizer.step()
        assert optimizer.accountant.num_steps == 1
        seen[z] = twin[0].weight.grad.double()
    assert relative_error(seen[0.0], true) < (0.05 if dtype == torch.bfloat16 else 2e-2)  # TF32 margins of a norm are 1/128
    assert abs(float((seen[2.0] - seen[0.0]).std()) / (2 * 0.1 / 64) - 1) < 0.03


def test_a_recording_that_fails_leaves_torch_as_it_was():
    """Current stream, memory, and a generator that draws on and can be recorded."""

    def waits(x):
        large = torch.ones(1 << 28, dtype=torch.int8)
        torch.cuda.current_stream().synchronize()  # which no recording takes
        return [x + large[:4]]

    def reserved() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    want = (torch.manual_seed(0), torch.randn(4), torch.randn(4))[1:]
    before = torch.cuda.current_stream(), reserved()
    torch.manual_seed(0)
    assert torch.equal(torch.randn(4), want[0])
    for _ in range(2):
        with pytest.raises(RuntimeError):
            replay.Recording(waits, [torch.zeros(4)], [], None)
    assert torch.equal(torch.randn(4), want[1])
    assert torch.cuda.current_stream() == before[0]
    assert reserved() <= before[1] + replay.SMALL_BYTES
    drawn = replay.Recording(lambda x: [torch.rand_like(x)], [torch.zeros(4)], [], None)
    first, second = drawn((torch.zeros(4),)), drawn((torch.zeros(4),))
    assert not torch.equal(first[0], second[0])


def test_a_recording_gives_conjugates():
    """Which torch does not compute before they are read, and compiled graphs give back so."""
    x = torch.randn(4, dtype=torch.complex64)
    (y,) = replay.Recording(lambda x: [(x * 2).conj()], [x], [], None)((x,))
    assert torch.equal(y, (x * 2).conj())


def test_a_step_that_counts_its_calls_counts_each_once():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.a(x)

    model = Counting()
    step = sw.per_sample_step(model, lambda model, x: model(x).square().sum(1), _answers, compile=True)
    for k, size in enumerate((4, 4, 4, 5, 5, 5, 4)):
        step(torch.randn(size, 3))
        assert model.calls.item() == k + 1
