"""Compiled steps of Hugging Face models with padding masks, against the oracle, for batches of two sizes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import samplewise as sw
from samplewise.testing import oracle, relative_error, relative_errors

V, T = 17, 5
BERT = {
    "vocab_size": V, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
    "max_position_embeddings": 12, "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT = {
    "vocab_size": V, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {
    "vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 12,
}  # fmt: skip
ENCODERS = {
    "bert": lambda **k: hf.BertForSequenceClassification(hf.BertConfig(**BERT, **k)),
    "roberta": lambda **k: hf.RobertaForSequenceClassification(hf.RobertaConfig(**BERT, pad_token_id=0, **k)),
    "electra": lambda **k: hf.ElectraForSequenceClassification(hf.ElectraConfig(**BERT, embedding_size=8, **k)),
    "distilbert": lambda **k: hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=V, dim=8, n_layers=1, n_heads=2, hidden_dim=12, max_position_embeddings=12, num_labels=3, dropout=0.0,
            attention_dropout=0.0, seq_classif_dropout=0.0, **k,
        )
    ),
    "gpt2-last-token": lambda **k: hf.GPT2ForSequenceClassification(
        hf.GPT2Config(**GPT, num_labels=3, pad_token_id=0, **k)
    ),
}  # fmt: skip
DECODERS = {
    "gpt2": lambda **k: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT, **k)),
    "llama": lambda **k: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, **k)),
    "mistral": lambda **k: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=3, **k)),
}
SEQ2SEQ = {
    "t5": lambda **k: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=V, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, **k
        )
    ),
    "bart": lambda **k: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=V, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=12, dropout=0.0, decoder_start_token_id=0, **k,
        )
    ),
}  # fmt: skip
EVERY = {**ENCODERS, **DECODERS, **SEQ2SEQ}


@pytest.fixture(autouse=True)
def _in_double(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)  # what is made of a graph is the compiler's matter
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def padded(size: int, *, left: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a mask under which every second row is shorter, and classes."""
    ids, mask = torch.randint(3, V, (size, T)), torch.ones(size, T, dtype=torch.long)
    for row in range(1, size, 2):
        mask[row, slice(row % 3 + 1) if left else slice(T - row % 3 - 1, T)] = 0
    return ids * mask, mask, torch.randint(3, (size,))


def classes(model: nn.Module, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, y, reduction="none")


def next_tokens(model: nn.Module, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum(1)


def same_tokens(model: nn.Module, ids: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").sum(1)


def loss_of(name: str) -> Any:
    return classes if name in ENCODERS else next_tokens if name in DECODERS else same_tokens


def assert_right(model: nn.Module, loss_fn: Any, answer: tuple, batch: tuple) -> None:
    truth = oracle(model, loss_fn, *batch)
    norms = torch.cat([G.flatten(1) for G in truth.values()], 1).norm(dim=1)
    assert relative_error(answer[0], norms) < 1e-9
    clipped = {name: torch.einsum("b,b...->...", (0.1 / norms).clamp(max=1), G) for name, G in truth.items()}
    for name, error in relative_errors(answer[1], clipped).items():
        assert error < 1e-9, name


def questions(grads: Any) -> tuple:
    return grads.norms(), grads.clipped_sum(max_norm=0.1)


@pytest.mark.parametrize("name", EVERY)
def test_padded_rows_match_the_oracle(name):
    model = EVERY[name](attn_implementation="sdpa")
    if name == "bart":  # in training a number is drawn for each layer, whether it is skipped
        model.eval()
    loss_fn = loss_of(name)
    step = sw.per_sample_step(model, loss_fn, questions, compile=True)
    for size in (4, 5):
        batch = padded(size)
        assert_right(model, loss_fn, step(*batch).answer, batch)
    full = (torch.randint(3, V, (4, T)), torch.ones(4, T, dtype=torch.long), torch.randint(3, (4,)))
    assert_right(model, loss_fn, step(*full).answer, full)
    assert (step.num_graphs, step.num_op_by_op) == (2, 0)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_the_mask_is_read_in_every_step(name):
    """A graph made where nothing is padded serves what is, and padding on the left."""
    model, loss_fn = EVERY[name](attn_implementation="sdpa"), loss_of(name)
    step = sw.per_sample_step(model, loss_fn, questions, compile=True)
    step(torch.randint(3, V, (4, T)), torch.ones(4, T, dtype=torch.long), torch.randint(3, (4,)))
    for left in (True, False):
        batch = padded(4, left=left)
        assert_right(model, loss_fn, step(*batch).answer, batch)
    assert step.num_graphs == 1


def test_layers_skipped_at_random_are_refused():
    model = EVERY["bart"](encoder_layerdrop=0.5)
    with pytest.raises(sw.SamplewiseError, match="compile=False"):
        sw.per_sample_step(model, same_tokens, questions, compile=True, verify=False)(*padded(4))
