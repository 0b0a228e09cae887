"""Which rows belong to which sample: sample ids, packed sequences, folds that are not plain."""

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import nn

import samplewise as sw
from samplewise import SamplesMixError, UnattributedError
from samplewise.fold import Fold
from samplewise.testing import oracle, relative_error


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def grouped(truth, ids):
    """The oracle of rows, added up for each sample."""
    num = int(ids.max()) + 1
    return {n: torch.zeros(num, *G.shape[1:], dtype=G.dtype).index_add_(0, ids, G) for n, G in truth.items()}


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
    "norm": lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)),
    "direct": lambda: Fn(lambda s, x: x * s.w + s.b, w=(5,), b=(1, 5)),
    "embedding": lambda: Fn(lambda s, x: s.e((x[:, :3] > 0).long()).flatten(1) + s.p, e=nn.Embedding(2, 3), p=(9,)),
    "conv": lambda: Fn(lambda s, x: s.c(x.unsqueeze(1)).flatten(1), c=nn.Conv1d(1, 2, 3)),
    "generic": lambda: Fn(lambda s, x: torch.einsum("bi,ij,jo->bo", x, s.u, s.v), u=(5, 2), v=(2, 3)),
    "derived": lambda: Fn(lambda s, x: F.linear(x, s.v / s.v.norm()), v=(3, 5)),
}


@pytest.mark.parametrize("ids", [[0, 0, 1, 1], [1, 0, 1, 0], [2, 0, 2, 2], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_sample_ids_group_rows(name, ids):
    model, x, ids = MODELS[name]().double(), data(4, 5), torch.tensor(ids)

    def rows(model, x):
        out = model(x)
        return (out + 0.3 * out.square()).sum(1)

    with sw.capture(model, sample_ids=ids) as grads:
        grads.backward(rows(model, x))
    truth = grouped(oracle(model, rows, x), ids)
    assert grads.norms().shape == (int(ids.max()) + 1,)
    for parameter, G in truth.items():
        assert relative_error(grads[parameter].materialize(), G) < 1e-9, parameter
        assert relative_error(grads[parameter].norms(), G.flatten(1).norm(dim=1)) < 1e-9, parameter
        assert relative_error(grads[parameter].sum(), G.sum(0)) < 1e-9, parameter


def packed_attention():
    def forward(s, x, mask):
        q, k, v = s.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return s.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))

    return Fn(forward, qkv=nn.Linear(5, 24), out=nn.Linear(8, 3)).double()


@pytest.mark.parametrize(("ids", "num_samples"), [([0, 1, 2], 3), ([0, 0, 1], 2), ([1, 0, 2], 3), ([0], 1)])
def test_rows_of_a_sample_are_added_up(ids, num_samples):
    t, totals = torch.arange(6.0).reshape(3, 2), torch.zeros(num_samples, 2)
    for row, sample in zip(t, ids * 3 if len(ids) == 1 else ids, strict=True):
        totals[sample] += row
    assert torch.equal(Fold(torch.tensor(ids), num_samples).total(t), totals)


def test_packed_sequences_behind_a_block_mask():
    model, x, ids = packed_attention(), data(1, 7, 5), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    mask = ids.unsqueeze(1) == ids.unsqueeze(0)
    with sw.capture(model, batch_dim=1, sample_ids=ids, verify=False) as grads:
        grads.mark(x)
        grads.backward(model(x, mask).square().sum((0, 2)))
    for b in range(3):
        model.zero_grad()
        own = x[:, ids == b]
        model(own, torch.ones(own.shape[1], own.shape[1], dtype=torch.bool)).square().sum().backward()
        for name, p in model.named_parameters():
            assert relative_error(grads[name].materialize()[b], p.grad) < 1e-9, name


def test_packed_sequences_that_see_each_other_are_refused():
    model, x, ids = packed_attention(), data(1, 7, 5), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    with sw.capture(model, batch_dim=1, sample_ids=ids, verify=False), pytest.raises(SamplesMixError, match="attention"):
        model(x, mask)


def test_bad_sample_ids_are_refused():
    for ids in (torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]]), torch.tensor([0, -1])):
        with pytest.raises(ValueError, match="sample_ids is a vector"):
            sw.capture(nn.Linear(2, 2), sample_ids=ids)


def test_rows_must_match_sample_ids():
    model = nn.Linear(5, 2).double()
    with sw.capture(model, sample_ids=torch.tensor([0, 0, 1])), pytest.raises(UnattributedError, match="3 rows"):
        model(data(4, 5))


def test_constants_joined_to_the_batch_are_refused():
    model = Fn(lambda s, x: s.l(torch.cat([x, torch.ones(1, 5).double()])), l=nn.Linear(5, 2)).double()
    with sw.capture(model), pytest.raises(UnattributedError, match="belong to no sample"):
        model(data(4, 5))


REORDERED = {
    "permuted": lambda s, x: s.l(x[torch.tensor([2, 0, 3, 1])])[torch.tensor([1, 3, 0, 2])],
    "doubled": lambda s, x: sum(s.l(torch.cat([x, x.tanh()])).chunk(2)),
    "repeated": lambda s, x: s.l(x.repeat_interleave(3, 0)).unflatten(0, (4, 3)).flatten(1),
    "tiled": lambda s, x: s.l(x.repeat(3, 1)).unflatten(0, (3, 4)).transpose(0, 1).flatten(1),
    "selected": lambda s, x: F.pad(s.l(x[:, 1:4]), (0, 2)),
    "split": lambda s, x: torch.cat([s.l(part) for part in x.split([1, 3])]),
    "windows": lambda s, x: s.l(x.unfold(1, 3, 1).flatten(0, 1)).unflatten(0, (4, 3)).flatten(1),
    "routed": lambda s, x: torch.zeros(4, 2).double().index_add(0, torch.tensor([3, 1, 0, 2]), s.l(x[torch.tensor([3, 1, 0, 2])])),
}  # fmt: skip


@pytest.mark.parametrize("name", REORDERED)
def test_rows_are_followed(name):
    width = 3 if name in ("selected", "windows") else 5
    model = Fn(REORDERED[name], l=nn.Linear(width, 2)).double()
    x = data(4, 5)
    with sw.capture(model, verify=False) as grads:  # these models name rows by number, so they cannot be run alone
        grads.backward(model(x).square().sum(1))
    total = torch.autograd.grad(model(x).square().sum(), model.l.weight)[0]
    losses = model(x).square().sum(1)
    for b in range(4):
        (G,) = torch.autograd.grad(losses[b], model.l.weight, retain_graph=True)
        assert relative_error(grads["l.weight"].materialize()[b], G) < 1e-9
    assert relative_error(grads["l.weight"].sum(), total) < 1e-9


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("lengths", [[5, 4, 2, 1], [2, 5, 1, 4]], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("deep", [False, True])
def test_packed_sequences_as_input(kind, lengths, deep):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 4, num_layers=2 if deep else 1, bidirectional=deep)
            self.head = nn.Linear(8 if deep else 4, 2)

        def forward(self, sequences):
            y, ends = self.rnn(sequences)
            padded, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
            ends = sum(end.sin().sum((0, 2)) for end in (ends if isinstance(ends, tuple) else (ends,)))
            return self.head(padded).square().sum(2), ends

    model = Tagger().double()
    sequences = [data(length, 3) for length in lengths]

    def pack(some):
        return nn.utils.rnn.pack_sequence(some, enforce_sorted=False)

    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    with sw.capture(model) as grads:
        steps, ends = model(pack(sequences))
        grads.backward((steps * mask).sum(1) + ends)
    for b, sequence in enumerate(sequences):
        model.zero_grad()
        sum(part.sum() for part in model(pack([sequence]))).backward()
        for name, p in model.named_parameters():
            assert relative_error(grads[name].materialize()[b], p.grad) < 1e-9, name
            assert relative_error(grads[name].norms()[b], p.grad.norm()) < 1e-9, name
