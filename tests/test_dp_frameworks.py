"""Private training inside Hugging Face's Trainer, with peft and in Lightning."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from private_runs import data, difference, mlp, private, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.errors import SamplesMixError, SamplewiseError

ROOT = Path(__file__).parents[1]
transformers = import_module("transformers")
import_module("accelerate")
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def texts(num=24, even=True):
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 11, (num, 6), generator=rng)
    labels = rows.clone()
    if not even:
        labels[::2, 3:] = -100
    return [{"input_ids": r, "labels": l} for r, l in zip(rows, labels, strict=True)]


def trainer(folder, *, even=True, model=None, arguments=None, privacy=None, **options):
    from samplewise.dp.huggingface import PrivateTrainer

    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=6, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        learning_rate=1e-2, lr_scheduler_type="constant", remove_unused_columns=False,
        **{"num_train_epochs": 2, "save_strategy": "no", **(arguments or {})},
    )  # fmt: skip
    given = {"max_grad_norm": 0.5, "noise_multiplier": 1.0, "seed": 0, **(privacy or {})}
    return PrivateTrainer(model=model or gpt2(), args=args, train_dataset=texts(even=even), privacy=given, **options)


def test_the_trainer_trains_privately(tmp_path):
    made = trainer(tmp_path)
    before = weights(made.model)
    made.train()
    optimizer = made.optimizer.optimizer
    assert isinstance(optimizer, torch.optim.AdamW) and isinstance(optimizer, sw.dp.PrivateOptimizer)
    assert optimizer.accountant.history == [(1.0, 0.25, 8)] and made.epsilon(1e-5) == optimizer.epsilon(1e-5)
    assert all(float((p - before[name]).abs().max()) > 0 for name, p in weights(made.model).items())


def test_a_trainers_step_is_the_plain_loops(tmp_path):
    """Same seed: the weights of the loop that everybody writes, though the Trainer's AdamW is the fused one."""
    made = trainer(tmp_path)
    made.train()
    model = gpt2()
    rows = texts()
    stacked = TensorDataset(*(torch.stack([row[k] for row in rows]) for k in ("input_ids", "labels")))
    model, optimizer, loader = private(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
        dataset=stacked,
        batch_size=6,
        max_grad_norm=0.5,
        noise_multiplier=1.0,
    )
    model.train()
    for _ in range(2):
        for ids, labels in loader:
            optimizer.zero_grad()
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
    assert difference(weights(model), weights(made.model)) < 1e-6


def test_a_resumed_trainer_goes_on_with_its_account(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    part = trainer(tmp_path / "part", arguments={"save_strategy": "steps", "save_steps": 3, "max_steps": 8})
    part.train()
    resumed = trainer(tmp_path / "part")
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-3"))
    optimizer = resumed.optimizer.optimizer
    assert optimizer.accountant.history == [(1.0, 0.25, 8)]
    assert difference(weights(resumed.model), weights(whole.model)) == 0


def test_unequal_numbers_of_tokens_need_a_loss_of_their_own(tmp_path):
    from samplewise.dp.huggingface import causal_lm_loss

    with pytest.raises(SamplesMixError, match="does not weigh all samples alike"):
        trainer(tmp_path, even=False).train()
    made = trainer(tmp_path, even=False, compute_loss_func=causal_lm_loss)
    made.train()
    assert made.optimizer.optimizer.accountant.num_steps == 8


@pytest.mark.parametrize("arguments", [{"gradient_accumulation_steps": 2}])
def test_what_the_trainer_would_do_wrong_is_refused(tmp_path, arguments):
    with pytest.raises(SamplewiseError, match="does not go with"):
        trainer(tmp_path, arguments=arguments)


def test_peft_adapters_train_privately():
    peft = import_module("peft")
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    rows = texts()
    stacked = TensorDataset(*(torch.stack([row[k] for row in rows]) for k in ("input_ids", "labels")))
    before = weights(model)
    model, optimizer, loader = private(
        model, optimizer, dataset=stacked, batch_size=8, max_grad_norm=0.5, noise_multiplier=1.0
    )
    for ids, labels in loader:
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    moved = {name for name, p in weights(model).items() if float((p - before[name]).abs().max()) > 0}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad} and len(moved) == 2


def test_lightning_trains_privately(tmp_path):
    """By manual optimization on the optimizer itself: Lightning's own step passes a closure."""
    lightning = import_module("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.5)

        def training_step(self, batch, _):
            optimizer = self.optimizers(use_pl_optimizer=False)
            x, y = batch
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(x), y))
            optimizer.step()

    class Private(Module):
        def __init__(self):
            super().__init__()
            self.loader = sw.dp.PoissonLoader.of(DataLoader(data(), batch_size=10), seed=0)

        def configure_optimizers(self):
            _, optimizer, _ = sw.dp.make_private(
                self.net, super().configure_optimizers(), self.loader, noise_multiplier=1.0, max_grad_norm=1.0, seed=0
            )
            return optimizer

        def train_dataloader(self):
            return self.loader

    module = Private()
    lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    ).fit(module)  # fmt: skip
    model, optimizer, loader = private(max_grad_norm=1.0, noise_multiplier=1.0)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert difference(weights(model), weights(module.net)) == 0


def test_lightnings_automatic_optimization_is_refused(tmp_path):
    lightning = import_module("lightning")
    loader = sw.dp.PoissonLoader.of(DataLoader(data(), batch_size=10))

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def configure_optimizers(self):
            inner = torch.optim.SGD(self.net.parameters(), lr=0.5)
            return sw.dp.make_private(self.net, inner, loader, noise_multiplier=1.0, max_grad_norm=1.0)[1]

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch[0]), batch[1])

    run = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(SamplewiseError, match="takes no closure"):
        run.fit(Module(), loader)


def test_the_example_runs():
    out = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "private_gpt2.py"), "--sentences", "200", "--epochs", "1", "--batch-size", "40"],
        capture_output=True, text=True, timeout=300, check=True,
        env={**__import__("os").environ, "PYTHONPATH": str(Path(sw.__file__).parents[1])},
    ).stdout  # fmt: skip
    assert "epsilon" in out and "perplexity" in out


class Tower(nn.Module):
    """A model that a user calls with keywords and whose output is a dataclass."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, *, ids, weight=None):
        return {"logits": self.head(self.emb(ids).mean(1))}


def test_keyword_calls_and_dict_outputs():
    rows = TensorDataset(torch.randint(11, (20, 6)), torch.randint(3, (20,)))
    model, optimizer, loader = private(Tower(), dataset=rows, max_grad_norm=1.0, noise_multiplier=1.0)
    for ids, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(ids=ids)["logits"], y).backward()
        optimizer.step()
    assert optimizer.accountant.num_steps == 2
