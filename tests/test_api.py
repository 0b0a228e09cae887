"""The public names, and the code of the README and the docs."""

import doctest
import inspect
import re
from pathlib import Path

import samplewise as sw
from samplewise.parameter import ParameterGrads

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_public_names_are_frozen():
    assert sorted(sw.__all__) == [
        "Gaussian", "Grads", "Kronecker", "NoiseScale", "Rademacher", "RunningMoments", "RunningNoiseScale", "RunningNorms",
        "SamplesMixError", "SamplewiseError", "SparseJL", "StepResult", "UnattributedError", "Verification",
        "call_for_per_sample_grads", "capture", "dp", "per_sample", "per_sample_step", "verify",
    ]  # fmt: skip
    assert all(hasattr(sw, name) for name in sw.__all__)


def test_arguments_are_frozen():
    assert list(inspect.signature(sw.capture).parameters) == [
        "model", "batch_size", "batch_dim", "sample_ids", "loss_reduction", "params", "exclude", "verify", "keep", "memory",
        "plan", "rates",
    ]  # fmt: skip
    assert list(inspect.signature(sw.per_sample_step).parameters) == [
        "model", "loss_fn", "query", "compile", "memory", "loss_reduction", "batch_dim", "verify", "plan", "rates",
        "params",
    ]  # fmt: skip
    assert str(inspect.signature(sw.call_for_per_sample_grads)).startswith(
        "(module: torch.nn.modules.module.Module, *, batch_size: int | None = None, loss_reduction: str = 'sum', "
        "batch_first: bool = True)"
    )
    assert list(inspect.signature(sw.verify).parameters) == [
        "model", "args", "batch_size", "batch_dim", "sample_ids", "kwargs",
    ]  # fmt: skip


def test_queries_are_frozen():
    public = {name for name in dir(sw.Grads) if not name.startswith("_")}
    of_both = {
        "materialize", "stream", "norms", "sq_norms", "weighted_sum", "clipped_sum", "normalized_sum", "sum", "dots", "gram",
        "cosines", "second_moment", "fisher_diagonal", "variance", "noise_scale", "project",
    }  # fmt: skip
    assert of_both | {"backward", "mark"} <= public
    assert of_both | {"of_samples"} <= set(dir(ParameterGrads))


def test_names_of_private_training_are_frozen():
    assert sorted(sw.dp.__all__) == [
        "Accountant", "Adaptive", "Automatic", "Change", "Clipped", "Noise", "PoissonLoader", "PrivateOptimizer", "Problem",
        "Steps", "clip_weights", "clipped", "epsilon", "fix", "make_private", "noise_multiplier_for", "noise_stds",
        "poisson_sample", "sum_noise_multiplier", "validate",
    ]  # fmt: skip
    assert list(inspect.signature(sw.dp.make_private).parameters) == [
        "model", "optimizer", "loader", "max_grad_norm", "noise_multiplier", "target_epsilon", "target_delta", "epochs",
        "clipping", "groups", "loss_reduction", "sample_ids", "views", "max_physical_batch_size", "accountant", "secure", "seed",
        "loss_fn", "compile", "options",
    ]  # fmt: skip


def test_what_claims_privacy_states_its_guarantee():
    claims = [
        sw.dp.make_private, sw.dp.PrivateOptimizer, sw.dp.PoissonLoader, sw.dp.poisson_sample, sw.dp.clipped, sw.dp.clip_weights,
        sw.dp.Adaptive, sw.dp.sum_noise_multiplier, sw.dp.Noise.added, sw.dp.noise_stds, sw.dp.epsilon,
        sw.dp.noise_multiplier_for, sw.dp.validate,
    ]  # fmt: skip
    for one in claims:
        assert "**Guarantee.**" in one.__doc__ and "|-|" in one.__doc__, one


def test_the_code_of_the_privacy_page_runs(capsys):
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "privacy.md").read_text(), re.S):
        exec(block, {})
    assert float(capsys.readouterr().out) > 0


def test_the_readmes_code_runs(capsys):
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, scope)
    assert "tensor([" in capsys.readouterr().out
    assert scope["model"][0].weight.grad_sample.shape == (32, 16, 8)


def test_the_examples_of_the_queries_are_right():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "queries.md").read_text(), re.S)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "queries.md", "docs/queries.md", 0)
    assert len(test.examples) > 40
    out: list[str] = []
    assert doctest.DocTestRunner(optionflags=flags).run(test, out=out.append).failed == 0, "".join(out)
