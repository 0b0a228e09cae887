"""What a mode does not see by itself: autograd.Functions, registered ops, compiled code."""

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from test_silent_errors import B, assert_right, data, linear, refused, two
from torch import Tensor, nn

import samplewise as sw
from samplewise import UnattributedError
from samplewise.testing import run_capture

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own


class InNumpy(torch.autograd.Function):
    """sin, by code that torch does not see."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.from_numpy(x.detach().numpy() * w.detach().numpy())

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class TimesWeight(Scaled):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w, 2 * x

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return g @ w.T + 2 * h, x.T @ g


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.sign()

    @staticmethod
    def backward(ctx, g):
        return g


class Coarse(torch.autograd.Function):
    """Half precision inside, as fused kernels have it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x.bfloat16() * w.bfloat16()).double()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (g.bfloat16() * w.bfloat16()).double(), (g.bfloat16() * x.bfloat16()).sum(0).double()


class Dropped(TimesWeight):
    @staticmethod
    def forward(ctx, x, w):
        mask = (torch.rand_like(x) > 0.5).to(x)
        ctx.save_for_backward(x * mask, w)
        return x * mask * w


class InPlace(TimesWeight):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x.clone(), w)
        ctx.mark_dirty(x)
        return x.mul_(w)


class WithIndices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        rows = torch.arange(len(x))
        ctx.mark_non_differentiable(rows)
        return x * w, None, rows

    @staticmethod
    def backward(ctx, g, _, __):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@pytest.mark.parametrize("function", [Coarse, Dropped])
def test_autograd_function_that_is_coarse_or_random_is_not_refused(function):
    model = Fn(lambda s, x: function.apply(x, s.w), w=(5,)).double()
    with sw.capture(model, verify=False) as grads:
        grads.backward(model(data(B, 5)).square().sum(1))
    assert grads.norms().shape == (B,)


FUNCTIONS = {
    "in place": lambda: Fn(lambda s, x: InPlace.apply(s.a(x), s.w), a=linear(5, 5), w=(5,)),
    "with other results": lambda: Fn(lambda s, x: WithIndices.apply(s.a(x), s.w)[0], a=linear(5, 5), w=(5,)),
    "that leaves torch": lambda: Fn(lambda s, x: s.b(InNumpy.apply(s.a(x))), **two()),
    "that leaves torch, residual": lambda: Fn(lambda s, x: s.b(InNumpy.apply(s.a(x))) + x, **two()),
    "of a parameter, leaves torch": lambda: Fn(lambda s, x: Scaled.apply(s.a(x), s.w), a=linear(5, 5), w=(5,)),
    "of a parameter, leaves torch, residual": lambda: Fn(lambda s, x: Scaled.apply(s.a(x), s.w) + x, a=linear(5, 5), w=(5,)),
    "of a parameter in torch": lambda: Fn(lambda s, x: TimesWeight.apply(s.a(x), s.w) + x, a=linear(5, 5), w=(5,)),
    "of a parameter, two results": lambda: Fn(lambda s, x: sum(TwoResults.apply(s.a(x), s.w)), a=linear(5, 5), w=(5, 5)),
    "of a parameter alone": lambda: Fn(lambda s, x: s.a(x) @ Sign.apply(s.w), a=linear(5, 5), w=(5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_function(name):
    assert_right(FUNCTIONS[name]().double(), data(B, 5))


class InPlaceBackward(TimesWeight):
    """Changes what it keeps where torch does not see it, as fused kernels do."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        x.data.mul_(2)
        return g * w, (g * x).sum(0)


class NormalisedBackward(TimesWeight):
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g / g.norm() * x).sum(0)


class OthersInBackward(TimesWeight):
    """Linear in the gradient, but with the rows of other samples."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x.flip(0)).sum(0)


class Recomputed(torch.autograd.Function):
    """A checkpoint as diffusion models have them: its backward runs the module again and asks for gradients of its parameters."""

    @staticmethod
    def forward(ctx, module, unused, x, *parameters):
        ctx.module, ctx.x, ctx.parameters, ctx.unused = module, x, parameters, unused
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        return None, None, *torch.autograd.grad(y, (x, *ctx.parameters), g, allow_unused=ctx.unused)


class Stored(Recomputed):
    @staticmethod
    def forward(ctx, module, unused, x, *parameters):
        with torch.enable_grad():
            ctx.x, ctx.parameters = x.detach().requires_grad_(), parameters
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        return None, None, *torch.autograd.grad(ctx.y, (ctx.x, *ctx.parameters), g, allow_unused=True)


class PartlyRecomputed(Recomputed):
    """x · w + module(x), where only the first term knows w by its argument."""

    @staticmethod
    def forward(ctx, module, unused, x, w):
        return Recomputed.forward(ctx, module, unused, x, w) + x * w

    @staticmethod
    def backward(ctx, g):
        _, _, of_x, of_w = Recomputed.backward(ctx, g)
        (w,) = ctx.parameters
        return None, None, of_x + g * w, (g * ctx.x).sum(0) + (0 if of_w is None else of_w)


class Rounded(torch.autograd.Function):
    """Gives its scale no gradient, as rounding straight through does."""

    @staticmethod
    def forward(ctx, x, scale):
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx, g):
        return g, None


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("unused", [True, False])
@pytest.mark.parametrize("function", [Recomputed, Stored])
@pytest.mark.parametrize("part", [lambda: linear(5, 5), lambda: nn.Sequential(linear(5, 5), nn.Dropout(0.5))])
def test_autograd_function_that_runs_a_module_of_its_own_is_refused(part, function, unused, verify):
    model = nn.ModuleDict({"a": linear(5, 5), "f": part(), "b": linear(5, 3)}).double()

    def losses(model, x):
        return model["b"](function.apply(model["f"], unused, model["a"](x), *model["f"].parameters())).square().sum(1)

    with sw.capture(model, verify=verify) as grads, pytest.raises(UnattributedError, match="a checkpoint of your own"):
        grads.backward(losses(model, data(B, 5)))


def test_autograd_function_that_knows_a_parameter_by_two_ways_is_refused():
    model = Fn(
        lambda s, x: s.a(PartlyRecomputed.apply(lambda t: t.sin() * s.w, True, x, s.w)), a=linear(5, 5), w=(5,)
    ).double()
    with sw.capture(model, verify=False) as grads, pytest.raises(UnattributedError, match="alone something else"):
        grads.backward(model(data(B, 5)).square().sum(1))


def test_autograd_function_that_gives_a_parameter_no_gradient():
    model, x = Fn(lambda s, x: s.a(Rounded.apply(x, s.scale)), a=linear(5, 5), scale=()).double(), data(B, 5)
    assert_right(model, x, exclude=["scale"])
    grads = run_capture(model, lambda model, x: model(x).square().sum(1), x)
    assert not grads["scale"].norms().any()


def test_autograd_function_whose_backward_uses_other_samples():
    refused(Fn(lambda s, x: OthersInBackward.apply(x, s.w), w=(5,)).double(), data(B, 5), words="alone", verify=False)


@pytest.mark.parametrize("function", [InPlaceBackward, NormalisedBackward])
def test_autograd_function_whose_backward_is_not_a_sum_over_samples(function):
    refused(Fn(lambda s, x: function.apply(x, s.w), w=(5,)).double(), data(B, 5), words="something else than the sum")


@torch.library.custom_op("samplewise_tests::mul", mutates_args=())
def mean_then_mul(x: Tensor, w: Tensor) -> Tensor:
    return x.mean(1, keepdim=True) * w


mean_then_mul.register_autograd(
    lambda ctx, g: (
        (g * ctx.w).sum(1, keepdim=True).expand_as(ctx.x) / ctx.x.shape[1],
        (g * ctx.x.mean(1, keepdim=True)).sum(0),
    ),
    setup_context=lambda ctx, inputs, output: vars(ctx).update(x=inputs[0], w=inputs[1]),
)


def test_an_op_of_somebody_elses_is_not_taken_for_torchs_of_that_name():
    assert_right(Fn(lambda s, x: mean_then_mul(s.a(x), s.w), a=linear(5, 5), w=(5,)).double(), data(B, 5))


COMPILED = {
    "function": lambda backend: Fn(lambda s, x: torch.compile(lambda a: F.gelu(a @ s.w), backend=backend)(x), w=(5, 5)),
    "part": lambda backend: Fn(lambda s, x: s.b(x) + s.a(s.b(x)), **two(a=torch.compile(linear(5, 5), backend=backend))),
    "model": lambda backend: torch.compile(nn.Sequential(linear(5, 5), nn.Tanh(), linear(5, 5)), backend=backend),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, backend):
    assert_right(COMPILED[name](backend).double(), data(B, 5))


def test_captures_leave_the_compiler_and_functions_as_they_were():
    apply = inspect.getattr_static(torch.autograd.Function, "apply")
    model = torch.compile(linear(5, 5), backend="eager")
    for _ in range(2):
        with sw.capture(model):
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"
            with sw.capture(linear(5, 5)):
                pass
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        assert torch._dynamo.eval_frame._stance.stance == "default"
        assert inspect.getattr_static(torch.autograd.Function, "apply") is apply
