"""The steps of RNN, LSTM and GRU on the CPU, forward and backward, with the gradient of every gate.

torch's own kernels hand that gradient out only at the price of weight gradients that nobody wants. Here the gates of all
steps are one tensor [R, gates], R the rows of all steps one after another, and only what has to wait for another step is
done step by step. Forward turns the gates into their values where they stand. Backward takes the derivatives of all steps
by their gates at once, [R, gates], and multiplies the rows of one step after another by what comes back in time. Products
are taken in place or into `out`, which autocast leaves alone.

In a graph both ways are ops of their own. It would otherwise hold every step: an LSTM of 100 took five minutes to compile.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samplewise.errors import UnattributedError
from samplewise.tracing import is_tracing

Walk = Callable[..., Iterator[tuple[Tensor, ...]]]
"""(states, *tensors) → for each step in turn the rows of the states [B, H] and of the tensors [R, ·] that it acts on."""


class Steps(torch.autograd.Function):
    """(outputs [R, H], *last states [B, H]) of one layer in one direction; the gates are written over.

    `hidden` stands for w h + b, the share of the recurrent weights in the gates: it is not read, but gets its gradient.
    A step acts on the first `sizes[t]` rows of the states; the others wait, as their sequences have ended, or, in a layer
    that runs `backwards`, not yet begun.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        kind: str,
        sizes: list[int],
        backwards: bool,
        gates: Tensor,
        hidden: Tensor,
        w: Tensor,
        b: Tensor | None,
        *first: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.kind, ctx.sizes, ctx.backwards = kind, sizes, backwards
        take = steps if is_tracing() else in_place
        w, states = w.to(gates.dtype), [state.to(gates.dtype) for state in first]  # under autocast they have their own
        b = None if b is None else b.to(gates.dtype)
        results = take(kind, sizes, backwards, gates.detach(), w, b, states)
        (y, *kept), states = results[: -len(first)], results[-len(first) :]
        ctx.save_for_backward(w, *(kept or [y]))
        return y, *states

    @staticmethod
    def backward(ctx: Any, gy: Tensor, *ends: Tensor) -> Any:  # type: ignore[override]
        w, *kept = ctx.saved_tensors
        take = steps_backward if is_tracing() else back
        if torch.is_grad_enabled():
            raise UnattributedError(
                f"a backward with create_graph=True met {ctx.kind} in a captured model, where it can be differentiated once "
                "alone. Take the second derivative outside of the capture."
            )
        with torch._C.DisableTorchFunction():
            results = take(ctx.kind, ctx.sizes, ctx.backwards, gy, w, kept, list(ends))
        (g, *hidden), states = results[: -len(ends)], results[-len(ends) :]
        return None, None, None, g, hidden[0] if hidden else g, None, None, *states


def in_place(
    kind: str, sizes: list[int], backwards: bool, gates: Tensor, w: Tensor, b: Tensor | None, first: list[Tensor]
) -> list[Tensor]:
    """[outputs, what else backward needs, last states]; the gates are written over."""
    states = [state.clone(memory_format=torch.contiguous_format) for state in first]
    return [*FORWARD[kind](walk_of(sizes, backwards), gates, w, b, *states), *states]


def back(
    kind: str, sizes: list[int], backwards: bool, gy: Tensor, w: Tensor, kept: list[Tensor], ends: list[Tensor]
) -> list[Tensor]:
    """[gradient of the gates, of the recurrent weights' share in them where that is another, of the first states]"""
    states = [end.clone(memory_format=torch.contiguous_format) for end in ends]
    return [*BACKWARD[kind](walk_of(sizes, not backwards), gy, w, *kept, *states), *states]


@torch.library.custom_op("samplewise::steps", mutates_args=())
def steps(
    kind: str, sizes: list[int], backwards: bool, gates: Tensor, w: Tensor, b: Tensor | None, first: list[Tensor]
) -> list[Tensor]:
    """What `in_place` gives, of a copy of the gates."""
    return in_place(kind, sizes, backwards, gates.clone(memory_format=torch.contiguous_format), w, b, first)


@torch.library.custom_op("samplewise::steps_backward", mutates_args=())
def steps_backward(
    kind: str, sizes: list[int], backwards: bool, gy: Tensor, w: Tensor, kept: list[Tensor], ends: list[Tensor]
) -> list[Tensor]:
    """What `back` gives."""
    return [t.contiguous() for t in back(kind, sizes, backwards, gy, w, kept, ends)]


@steps.register_fake
def _(
    kind: str, sizes: list[int], backwards: bool, gates: Tensor, w: Tensor, b: Tensor | None, first: list[Tensor]
) -> list[Tensor]:
    R, H = len(gates), first[0].shape[1]
    widths = {"lstm": [H, 4 * H, H], "gru": [H, 3 * H, H, H]}.get(kind, [H])
    return [*(gates.new_empty(R, width) for width in widths), *(state.new_empty(state.shape) for state in first)]


@steps_backward.register_fake
def _(
    kind: str, sizes: list[int], backwards: bool, gy: Tensor, w: Tensor, kept: list[Tensor], ends: list[Tensor]
) -> list[Tensor]:
    gradients = [kept[0].new_empty(len(gy), len(w)) for _ in range(2 if kind == "gru" else 1)]
    return [*gradients, *(end.new_empty(end.shape) for end in ends)]


def walk_of(sizes: list[int], backwards: bool) -> Walk:
    def walk(states: tuple[Tensor, ...], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        parts = [[state[:n] for n in sizes] for state in states] + [t.split(sizes) for t in tensors]
        return zip(*map(reversed, parts) if backwards else parts, strict=True)

    return walk


def rnn(activate: Callable[[Tensor], Tensor], walk: Walk, gates: Tensor, w: Tensor, b: Any, h: Tensor) -> list[Tensor]:
    """h ← act(gates + w h + b)"""
    if b is not None:
        gates += b
    for h_t, a_t in walk((h,), gates):
        h_t.copy_(activate(a_t.addmm_(h_t, w.T)))
    return [gates]


def rnn_backward(
    derivative: Callable[[Tensor], Tensor], walk: Walk, gy: Tensor, w: Tensor, y: Tensor, dh: Tensor
) -> list[Tensor]:
    """g = dh act'"""
    g = derivative(y)
    for dh_t, gy_t, g_t in walk((dh,), gy, g):
        torch.mm(g_t.mul_(dh_t.add_(gy_t)), w, out=dh_t)
    return [g]


def lstm(walk: Walk, gates: Tensor, w: Tensor, b: Tensor | None, h: Tensor, c: Tensor) -> list[Tensor]:
    """i, f, o = σ and g = tanh of gates + w h + b;  c ← f c + i g;  h ← o tanh(c)"""
    if b is not None:
        gates += b
    H = h.shape[1]
    y, before = gates.new_empty(len(gates), H), gates.new_empty(len(gates), H)
    i, f, g, o = gates.split(H, 1)
    i_f = gates[:, : 2 * H]
    for h_t, c_t, a_t, if_t, i_t, f_t, g_t, o_t, before_t, y_t in walk((h, c), gates, i_f, i, f, g, o, before, y):
        a_t.addmm_(h_t, w.T)
        if_t.sigmoid_()
        g_t.tanh_()
        o_t.sigmoid_()
        before_t.copy_(c_t)
        c_t.mul_(f_t).addcmul_(i_t, g_t)
        y_t.copy_(torch.tanh(c_t, out=h_t).mul_(o_t))
    return [y, gates, before]


def lstm_backward(walk: Walk, gy: Tensor, w: Tensor, gates: Tensor, before: Tensor, dh: Tensor, dc: Tensor) -> list[Tensor]:
    """dc ← dc + dh o tanh'(c);  i, f and g get dc times their derivative of c, o gets dh tanh(c) σ';  dc ← dc f"""
    i, f, g, o = gates.split(dh.shape[1], 1)
    tanh_c = (f * before).addcmul_(i, g).tanh_()
    by_c = (1 - tanh_c.square()).mul_(o)
    d = torch.stack([(i - i.square()) * g, (f - f.square()) * before, (1 - g.square()) * i, (o - o.square()) * tanh_c], 1)
    all_gates = d.flatten(1)
    for dh_t, dc_t, gy_t, f_t, by_t, ifg_t, o_t, all_t in walk((dh, dc), gy, f, by_c, d[:, :3], d[:, 3], all_gates):
        dc_t.addcmul_(dh_t.add_(gy_t), by_t)
        ifg_t.mul_(dc_t.unsqueeze(1))
        o_t.mul_(dh_t)
        dc_t.mul_(f_t)
        torch.mm(all_t, w, out=dh_t)
    return [all_gates]


def gru(walk: Walk, gates: Tensor, w: Tensor, b: Tensor | None, h: Tensor) -> list[Tensor]:
    """r, z = σ(gates + w h + b), n = tanh(gate + r (w h + b));  h ← n + z (h - n)"""
    H = h.shape[1]
    b = gates.new_zeros(3 * H) if b is None else b
    y, before, hidden_n = (gates.new_empty(len(gates), H) for _ in range(3))
    share = gates.new_empty(len(h), 3 * H)
    r, z, n = gates.split(H, 1)
    r_z = gates[:, : 2 * H]
    for h_t, share_t, rz_t, r_t, z_t, n_t, before_t, hidden_t, y_t in walk((h, share), r_z, r, z, n, before, hidden_n, y):
        torch.addmm(b, h_t, w.T, out=share_t)
        rz_t.add_(share_t[:, : 2 * H]).sigmoid_()
        n_t.addcmul_(r_t, hidden_t.copy_(share_t[:, 2 * H :])).tanh_()
        y_t.copy_(torch.lerp(n_t, before_t.copy_(h_t), z_t, out=h_t))
    return [y, gates, before, hidden_n]


def gru_backward(
    walk: Walk, gy: Tensor, w: Tensor, gates: Tensor, before: Tensor, hidden_n: Tensor, dh: Tensor
) -> list[Tensor]:
    """n gets dh (1 - z) tanh', its hidden share r times that, r and z dh times their derivative of h;  dh ← dh z + g w"""
    r, z, n = gates.split(dh.shape[1], 1)
    by_n = (1 - n.square()) * (1 - z)
    by_r, by_z = (r - r.square()) * hidden_n * by_n, (z - z.square()) * (before - n)
    d = torch.stack([by_n, by_r, by_z, by_n * r], 1)  # n as the input sees it, then r, z, n as the recurrent weights do
    hidden = d[:, 1:].flatten(1)
    for dh_t, gy_t, z_t, d_t, g_t in walk((dh,), gy, z, d, hidden):
        d_t.mul_(dh_t.add_(gy_t).unsqueeze(1))
        dh_t.mul_(z_t).addmm_(g_t, w)
    return [torch.cat([d[:, 1:3].flatten(1), d[:, 0]], 1), hidden]


FORWARD: dict[str, Callable[..., list[Tensor]]] = {
    "rnn_tanh": partial(rnn, torch.tanh_),
    "rnn_relu": partial(rnn, torch.relu_),
    "lstm": lstm,
    "gru": gru,
}
BACKWARD: dict[str, Callable[..., list[Tensor]]] = {
    "rnn_tanh": partial(rnn_backward, lambda y: 1 - y.square()),
    "rnn_relu": partial(rnn_backward, lambda y: (y > 0).to(y.dtype)),
    "lstm": lstm_backward,
    "gru": gru_backward,
}
