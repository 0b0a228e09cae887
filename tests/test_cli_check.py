"""`samplewise check`: its verdicts and exit statuses, and the inputs that it makes from words."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer import BadParameter
from typer.testing import CliRunner, Result

from samplewise.cli import main
from samplewise.cli.check import dtype_from, input_from, inputs_from, model_from, verdict
from samplewise.verification.table import Row, Verification

ZOO = """
import torch
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def normed():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.spare = nn.Embedding(11, 4), nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, ids, *, mask):
        return self.head(self.embed(ids)) * mask.unsqueeze(-1)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x / x.abs().max().item())


class Silent(nn.Linear):
    def forward(self, x):
        return "no tensor"


class Seen(nn.Linear):
    def forward(self, x):
        print("dtype", self.weight.dtype, x.dtype, "training", self.training, "weight", self.weight[0, 0].item())
        return super().forward(x)


seen = lambda: Seen(6, 2)
scaled = lambda: Scaled(6, 2)
silent = lambda: Silent(6, 2)
ready = mlp().double()
recurrent = lambda: nn.GRU(6, 4)
nothing = lambda: "a string"


class Group:
    @staticmethod
    def make():
        return mlp()


def broken():
    raise ValueError("no weights here")
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the command in a directory that holds `zoo.py`."""
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "zoo", raising=False)

    def run(*words: str) -> Result:
        return CliRunner().invoke(main.app, ["check", *words], env={"COLUMNS": "160"}, catch_exceptions=False)

    return run


def cells(result: Result) -> list[list[str]]:
    lines = [line for line in result.output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


# --- verdicts ----------------------------------------------------------------------------------------------------------------


def test_a_right_model(check):
    result = check("zoo:mlp", "--input", "4x6")
    assert result.exit_code == 0
    assert [row[:3] for row in cells(result)] == [[f"{k}.{n}", "linear", "rule"] for k in (0, 2) for n in ("weight", "bias")]
    assert all(float(row[4]) < 1e-5 for row in cells(result))
    assert "samples 0 and 3" in result.output
    assert "right: gradients of 4 parameters in the batch are those of samples 0 and 3 run alone" in " ".join(
        result.output.split()
    )


def test_a_batch_norm_is_refused_by_name(check):
    result = check("zoo:normed", "--input", "4x3x8x8", "--train")
    assert result.exit_code == 1
    assert result.output.startswith("refused: ")
    assert "batch_norm" in result.output
    assert "Traceback" not in result.output
    assert check("zoo:normed", "--input", "4x3x8x8", "--eval").exit_code == 0


def test_a_model_that_leaves_torch_is_wrong(check):
    result = check("zoo:scaled", "--input", "4x6")
    assert result.exit_code == 1
    assert "wrong: the model gives a sample another output alone than in its batch" in " ".join(result.output.split())


def test_a_model_that_fails_on_its_inputs(check):
    result = check("zoo:mlp", "--input", "4x7")
    assert result.exit_code == 1
    assert result.output.startswith("failed: the model raised RuntimeError on these inputs: ")
    assert "4x7" in result.output
    assert "Traceback" not in result.output


def test_a_model_of_which_nothing_can_be_checked_is_not_called_right(check):
    result = check("zoo:silent", "--input", "4x6")
    assert result.exit_code == 1
    assert "nothing was checked" in result.output


def test_wrong_rows_are_named():
    rows = tuple(
        Row(name, "linear", "rule", "4 samples", error, error < 1e-3) for name, error in {"a": 0.0, "b": 0.5}.items()
    )
    is_right, words = verdict(Verification(rows, (0, 3), 0.0, True))
    assert (is_right, words) == (False, "the gradients of b are not those of the samples run alone.")


# --- inputs and options ------------------------------------------------------------------------------------------------------


def test_several_inputs_by_place_and_name(check):
    result = check("zoo:Tagger", "--input", "ids:4x7:11", "--input", "mask=torch.ones(4, 7)")
    assert result.exit_code == 0
    assert [row[0] for row in cells(result)] == ["embed.weight", "head.weight", "head.bias"]
    assert "No gradient reached spare.weight, spare.bias." in result.output


def test_samples_along_another_dimension(check):
    result = check("zoo:recurrent", "--input", "7x4x6", "--batch-dim", "1")
    assert result.exit_code == 0
    assert "samples 0 and 3" in result.output


def test_batch_size_settles_what_inputs_leave_open(check):
    shapes = ["--input", "4x6", "--input", "h=torch.zeros(2, 3)"]
    result = check("zoo:mlp", *shapes)
    assert result.exit_code == 1
    assert "sizes [2, 4]" in result.output
    assert "sizes" not in check("zoo:mlp", *shapes, "--batch-size", "4").output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "dtype torch.float32 torch.float32 training True"),
        (["--dtype", "float64"], "dtype torch.float64 torch.float64 training True"),
        (["--eval"], "dtype torch.float32 torch.float32 training False"),
    ],
)
def test_dtype_and_mode(check, options, words):
    assert words in check("zoo:seen", "--input", "4x6", *options).output


def test_seed(check):
    first, again, other = (check("zoo:seen", "--input", "4x6", "--seed", seed).output for seed in "112")
    assert first == again
    assert first != other


@pytest.mark.parametrize("factory", ["zoo:ready", "zoo:Group.make", "zoo:mlp"])
def test_factories(check, factory):
    assert check(factory, "--input", "4x6").exit_code == 0


def test_installed_packages(check):
    assert check("torch.nn:Identity", "--input", "4x6").exit_code == 1  # no parameter, so nothing to check
    assert isinstance(model_from("torch.nn:Flatten"), torch.nn.Flatten)


# --- bad usage ---------------------------------------------------------------------------------------------------------------

BAD = {
    "no input": ["zoo:mlp"],
    "no colon": ["zoo.mlp", "--input", "4x6"],
    "no module": ["no_such_zoo:mlp", "--input", "4x6"],
    "no factory": ["zoo:no_such_model", "--input", "4x6"],
    "a factory that raises": ["zoo:broken", "--input", "4x6"],
    "a factory of something else": ["zoo:nothing", "--input", "4x6"],
    "no expression": ["zoo:mlp", "--input", "4 x"],
    "an unknown name": ["zoo:mlp", "--input", "numpy.ones(4)"],
    "ids below nothing": ["zoo:Tagger", "--input", "ids:4x7:0"],
    "no dtype": ["zoo:mlp", "--input", "4x6", "--dtype", "float7"],
    "a dtype of integers": ["zoo:mlp", "--input", "4x6", "--dtype", "int64"],
    "no batch": ["zoo:mlp", "--input", "4x6", "--batch-size", "0"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_usage(check, name):
    result = check(*BAD[name])
    assert result.exit_code == 2
    assert "Usage" in result.output
    assert "Traceback" not in result.output


def test_bad_usage_says_what_went_wrong(check):
    assert "no weights here" in check("zoo:broken", "--input", "4x6").output
    assert "not an nn.Module" in check("zoo:nothing", "--input", "4x6").output
    assert "no_such_zoo" in check("no_such_zoo:mlp", "--input", "4x6").output


# --- from words --------------------------------------------------------------------------------------------------------------


def test_inputs_from_words():
    args, kwargs = inputs_from(["2x3", "ids:4x5:7", "x=5", "flag=True", "None"], dtype=torch.float64)
    floats, ids, nothing = args
    assert (floats.shape, floats.dtype) == ((2, 3), torch.float64)
    assert (ids.shape, ids.dtype, bool((ids < 7).all())) == ((4, 5), torch.long, True)
    assert nothing is None
    assert kwargs["x"].shape == (5,)
    assert kwargs["flag"] is True


def test_an_expression_may_hold_equal_signs():
    args, kwargs = inputs_from(["torch.ones(2, dtype=torch.long)", "y=torch.ones(2, dtype=torch.int)"], dtype=torch.float32)
    assert args[0].dtype == torch.long
    assert kwargs["y"].dtype == torch.int
    assert input_from("1 == 1", dtype=torch.float32) is True


def test_dtypes_from_words():
    assert dtype_from("bfloat16") is torch.bfloat16
    assert dtype_from("complex64") is torch.complex64
    with pytest.raises(BadParameter, match="'nn' is not a floating-point dtype"):
        dtype_from("nn")


def test_as_a_program(tmp_path):
    (tmp_path / "zoo.py").write_text(ZOO)
    program = Path(sys.executable).with_name("samplewise")
    done = subprocess.run([program, "check", "zoo:mlp", "--input", "4x6"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "right: " in done.stdout
