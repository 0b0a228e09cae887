"""The public names, and the README's own code."""

import inspect
import re
from pathlib import Path

import samplewise as sw

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_public_names_are_frozen():
    assert sorted(sw.__all__) == [
        "Grads", "SamplesMixError", "SamplewiseError", "UnattributedError", "Verification", "call_for_per_sample_grads",
        "capture", "verify",
    ]  # fmt: skip
    assert all(hasattr(sw, name) for name in sw.__all__)


def test_arguments_are_frozen():
    assert list(inspect.signature(sw.capture).parameters) == [
        "model", "batch_size", "batch_dim", "sample_ids", "loss_reduction", "params", "exclude", "verify", "keep", "memory",
        "plan", "rates",
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
    assert {"norms", "materialize", "weighted_sum", "clipped_sum", "sum", "dots", "backward", "mark"} <= public


def test_the_readmes_code_runs(capsys):
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, scope)
    assert "tensor([" in capsys.readouterr().out
    assert scope["model"][0].weight.grad_sample.shape == (32, 16, 8)
