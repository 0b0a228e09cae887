"""RNN, LSTM and GRU: sequence Outers of the gradients of the gates.

A layer's input weights act on the whole sequence at once, so they are an ordinary linear layer. What is left is the
recurrence, with the gradient g of every gate of every step, of which the recurrent weights get g ⊗ h of the step before.
On the CPU the steps are written out (`Steps`). Elsewhere, and in half precision, torch's own kernel runs them with the
identity as input weights, so that g is the gradient of its input.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from samplewise.errors import SamplesMixError, UnattributedError
from samplewise.factors.dense import Dense
from samplewise.factors.outer import Outer
from samplewise.ops import cudnn
from samplewise.ops.registry import Meeting, expansion, rule
from samplewise.ops.steps import Steps
from samplewise.samples import Layout, same_ids
from samplewise.tracing import is_tracing, untraced

KERNELS = {"lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}


@expansion(*KERNELS.values())
def recurrent(meeting: Meeting, input: Tensor, *args: Any) -> Any:
    """All layers and directions, one `recurrence` each."""
    if isinstance(args[0], Tensor) and args[0].ndim == 1 and not args[0].is_floating_point():
        batch_sizes, hx, weights, _, num_layers, dropout, train, bidirectional = args
        batch_first = False
    else:
        hx, weights, _, num_layers, dropout, train, bidirectional, batch_first = args
        batch_sizes = None
    if batch_sizes is None and meeting.is_data(input) and meeting.layout(input).dims not in ((0 if batch_first else 1,), ()):
        raise SamplesMixError(
            f"{meeting.name} runs along the dimension in which the samples lie: {meeting.layout(input)}, batch_first={batch_first}. "
            "Each sample would see the ones before it. Set batch_first, or transpose the input."
        )
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    num_directions = 2 if bidirectional else 1
    a_direction = len(weights) // (num_layers * num_directions)
    projects = a_direction % 2 == 1
    x = input.transpose(0, 1) if batch_first else input
    last: list[list[Tensor]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            k = layer * num_directions + direction
            w_ih, w_hh, *biases = weights[k * a_direction : (k + 1) * a_direction]
            w_hr = biases.pop() if projects else None
            b_ih, b_hh = biases or (None, None)
            first = [state[k : k + 1] for state in states]
            gates = F.linear(x, w_ih, b_ih)
            if any(map(meeting.is_weight, states)):  # a learned state is the same for all samples
                first = [s + torch.zeros_like(_first_step(gates, batch_sizes, s)) for s in first]
            if w_hr is not None:
                y, *ends = projected(gates, first, w_hh, b_hh, w_hr, batch_sizes, direction == 1)
            else:
                y, *ends = recurrence(meeting.name, gates, first, w_hh, b_hh, batch_sizes, direction == 1)
            outputs.append(y)
            last.append(ends)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    ends = [torch.cat(states) for states in zip(*last, strict=True)]
    return (x.transpose(0, 1) if batch_first else x), *ends


def _first_step(gates: Tensor, batch_sizes: Tensor | None, state: Tensor) -> Tensor:
    """Data of the shape of a state, one row a sample."""
    rows = gates[:1] if batch_sizes is None else gates[: int(batch_sizes[0])].unsqueeze(0)
    return rows[..., : state.shape[-1]]


def recurrence(
    kind: str, gates: Tensor, first: list[Tensor], w_hh: Tensor, b_hh: Tensor | None, batch_sizes: Any, backwards: bool
) -> tuple[Tensor, ...]:
    """(outputs, *last states) of one layer in one direction, from the gates' share of its input."""
    tensors = [gates, *first, w_hh, *([] if b_hh is None else [b_hh])]
    if has_torch_function(tensors):
        return handle_torch_function(recurrence, tensors, kind, gates, first, w_hh, b_hh, batch_sizes, backwards)
    return run(kind, gates, first, w_hh, b_hh, batch_sizes, backwards, is_rule=False)


def run(
    kind: str,
    gates: Tensor,
    first: list[Tensor],
    w_hh: Tensor,
    b_hh: Any,
    batch_sizes: Any,
    backwards: bool,
    *,
    is_rule: bool,
) -> Any:
    """By torch's own kernel; where that is cuDNN's and a rule takes care of samples and weights, by an op that graphs hold."""
    if backwards:
        gates = reversed_steps(gates, batch_sizes)
    if is_rule and cudnn.takes(gates):
        sizes = [] if batch_sizes is None else batch_sizes.tolist()
        y, *ends = cudnn.Cudnn.apply(kind, sizes, gates, w_hh, b_hh, *first)  # type: ignore[misc]
    else:
        identity = torch.eye(gates.shape[-1], dtype=gates.dtype, device=gates.device)
        nothing = gates.new_zeros(gates.shape[-1])
        weights = [identity, w_hh, nothing, nothing if b_hh is None else b_hh]
        given = [first if kind == "lstm" else first[0], weights, True, 1, 0.0, True, False]  # no dropout
        y, *ends = KERNELS[kind](gates, *given, False) if batch_sizes is None else KERNELS[kind](gates, batch_sizes, *given)
    return (reversed_steps(y, batch_sizes) if backwards else y), *ends


def run_steps(
    kind: str, gates: Tensor, hidden: Tensor, first: list[Tensor], w_hh: Tensor, b_hh: Any, batch_sizes: Any, backwards: bool
) -> Any:
    """As `run`; the gates are written over, and `hidden` gets the gradient of the recurrent weights' share in them."""
    *lead, _ = gates.shape
    sizes = [lead[1]] * lead[0] if batch_sizes is None else batch_sizes.tolist()
    flat_gates, flat_hidden = gates.flatten(0, -2), hidden.flatten(0, -2)
    states = (state[0] for state in first)
    y, *ends = Steps.apply(kind, sizes, backwards, flat_gates, flat_hidden, w_hh, b_hh, *states)  # type: ignore[misc]
    return y.view(*lead, y.shape[-1]), *(end.unsqueeze(0) for end in ends)


@rule(recurrence)
def recurrence_rule(
    meeting: Meeting,
    kind: str,
    gates: Tensor,
    first: list[Tensor],
    w_hh: Tensor,
    b_hh: Any,
    batch_sizes: Any,
    backwards: bool,
) -> Any:
    """gate gradients g [T, B, gates]; w_hh gets g ⊗ h of the step before and b_hh gets g.

    In a GRU the hidden share of the last gate is multiplied by r before it is added, so its gradient is r · g.
    """
    layout = meeting.layout(gates)
    states = states_layout(layout, gates, batch_sizes)
    if any(meeting.is_data(s) and not same_ids(meeting.layout(s), states) for s in first):
        raise SamplesMixError(
            f"{kind} was given the initial states of other samples than those it runs on. Give each its own."
        )
    rows = layout.fold(1)
    plain_w, plain_b = meeting.plain(w_hh), meeting.plain(b_hh)
    learns = plain_w.requires_grad or (plain_b is not None and plain_b.requires_grad)  # by ordinary autograd
    by_steps = takes_steps(gates) and not learns
    seen: list[tuple[Tensor, int]] = []  # the outputs and their version, known once the steps were taken

    def steps_before(h0: Tensor) -> Tensor:
        ((y, version),) = seen
        if y._version != version:
            raise UnattributedError(
                f"the output of {kind} was changed in place before backward, and with it the states that the gradients of its "
                "recurrent weights are made of. Change a copy of it."
            )
        return previous(y, h0[0], batch_sizes, backwards)

    def hidden_gates(g: Tensor, h0: Tensor, *inner: Tensor) -> Tensor:
        if not inner:
            return g
        (gates, w_hh, *b_hh), H = inner, h0.shape[-1]
        r = torch.sigmoid(gates[..., :H] + F.linear(steps_before(h0), w_hh[:H], b_hh[0][:H] if b_hh else None))
        return torch.cat([g[..., : 2 * H], g[..., 2 * H :] * r], -1)

    def weight(g: Tensor, h0: Tensor, *inner: Tensor) -> Outer:
        return Outer.of_rows(rows(steps_before(h0)), rows(hidden_gates(g, h0, *inner)))

    def bias(g: Tensor, h0: Tensor, *inner: Tensor) -> Dense:
        return Dense.of_sum(rows(hidden_gates(g, h0, *inner)))

    inner = (gates, plain_w, *([] if plain_b is None else [plain_b])) if kind == "gru" and not by_steps else ()
    meeting.use(w_hh, weight, keep=(first[0], *inner))
    meeting.use(b_hh, bias, keep=(first[0], *inner))
    if by_steps:
        hidden = meeting.tap(gates.new_zeros(()).expand_as(gates))
        y, *ends = run_steps(kind, gates, hidden, first, plain_w, plain_b, batch_sizes, backwards)
    else:
        y, *ends = run(kind, meeting.tap(gates), first, plain_w, plain_b, batch_sizes, backwards, is_rule=not learns)
    seen.append((y.detach(), y._version))
    return meeting.marked([y, *ends], [layout] + [states] * len(ends))


def takes_steps(gates: Tensor) -> bool:
    """Whether the steps are written out here: on the CPU torch's own are slower, and oneDNN's of bfloat16 give a graph no backward."""
    return gates.is_cpu and (gates.dtype in (torch.float32, torch.float64) or is_tracing())


@untraced
def states_layout(layout: Layout, gates: Tensor, batch_sizes: Tensor | None) -> Layout:
    """Of a state [1, B, H]."""
    ids = layout.ids.expand(gates.shape[0], *layout.ids.shape[1:]) if batch_sizes is not None else layout.ids[:1]
    ids = ids[: int(batch_sizes[0])] if batch_sizes is not None else ids
    return Layout(ids.reshape(1, -1, 1), layout.num_samples)


def previous(y: Tensor, h0: Tensor, batch_sizes: Tensor | None, backwards: bool) -> Tensor:
    """The state that each step started from: the output of the step before it, h0 [B, H] for the first."""
    if batch_sizes is None:
        return torch.cat([y[1:], h0.unsqueeze(0)] if backwards else [h0.unsqueeze(0), y[:-1]])
    steps = list(y.split(batch_sizes.tolist()))
    if not backwards:
        return torch.cat([h0, *(step[: len(following)] for step, following in pairwise(steps))])
    before = [torch.cat([following, h0[len(following) : len(step)]]) for step, following in pairwise(steps)]
    return torch.cat([*before, h0[: len(steps[-1])]])


def reversed_steps(t: Tensor, batch_sizes: Tensor | None) -> Tensor:
    """The sequences of `t` from their own last step to their first."""
    if batch_sizes is None:
        return t.flip(0)
    sizes = batch_sizes.tolist()
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    lengths = [sum(size > b for size in sizes) for b in range(sizes[0])]
    order = [starts[lengths[b] - 1 - k] + b for k, size in enumerate(sizes) for b in range(size)]
    return t[torch.tensor(order, device=t.device)]


def projected(
    gates: Tensor, first: list[Tensor], w_hh: Tensor, b_hh: Any, w_hr: Tensor, batch_sizes: Any, backwards: bool
) -> tuple[Tensor, ...]:
    """(outputs, *last states) of an LSTM with a projection of its output, step by step."""
    if backwards:
        gates = reversed_steps(gates, batch_sizes)
    steps = gates.unbind(0) if batch_sizes is None else gates.split(batch_sizes.tolist())
    h, c = (state[0] for state in first)
    outputs, ended = [], []
    for step in steps:
        if len(step) < len(h):  # sequences that have ended keep their state
            ended.append((h[len(step) :], c[len(step) :]))
            h, c = h[: len(step)], c[: len(step)]
        i, f, g, o = (step + F.linear(h, w_hh, b_hh)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = F.linear(torch.sigmoid(o) * torch.tanh(c), w_hr)
        outputs.append(h)
    ended.append((h, c))
    h, c = (torch.cat(states) for states in zip(*reversed(ended), strict=True))
    y = torch.stack(outputs) if batch_sizes is None else torch.cat(outputs)
    return (reversed_steps(y, batch_sizes) if backwards else y), h.unsqueeze(0), c.unsqueeze(0)


@expansion(torch.lstm_cell)
def lstm_cell(
    meeting: Meeting, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """One step, written out: i, f, g, o gates."""
    h, c = hx
    i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


@expansion(torch.gru_cell)
def gru_cell(
    meeting: Meeting, input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """One step, written out: r, z, n gates."""
    xr, xz, xn = F.linear(input, w_ih, b_ih).chunk(3, -1)
    hr, hz, hn = F.linear(hx, w_hh, b_hh).chunk(3, -1)
    z = torch.sigmoid(xz + hz)
    n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return (1 - z) * n + z * hx


@expansion(torch.rnn_tanh_cell, torch.rnn_relu_cell)
def rnn_cell(
    meeting: Meeting, input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """One step, written out."""
    gate = F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh)
    return torch.tanh(gate) if meeting.name == "rnn_tanh_cell" else torch.relu(gate)
