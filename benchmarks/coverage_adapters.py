"""Adapters of peft on a small Llama for coverage.py: they alone are trained."""

from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from coverage_cases import Use
from coverage_models import LeftOutError, configured, tokens, use
from torch import Tensor, nn

QV = ["q_proj", "v_proj"]
ASKED: dict[str, dict[str, Any]] = {
    "AdaLora": {"total_step": 10, "init_r": 4},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LNTuning": {"target_modules": ["input_layernorm", "norm"]},
    "BOFT": {"boft_block_size": 4},
    "OFT": {"oft_block_size": 4},
    "C3A": {"block_size": 8},
    "FourierFT": {"n_frequency": 20},
    "WaveFT": {"n_frequency": 20},
    "VBLoRA": {"num_vectors": 8, "vector_length": 4, "topk": 2},
    "Road": {"group_size": 4},
    "TrainableTokens": {"token_indices": [4, 5, 6]},
    "PrefixTuning": {"num_virtual_tokens": 3},
    "PromptTuning": {"num_virtual_tokens": 3},
    "PromptEncoder": {"num_virtual_tokens": 3, "encoder_hidden_size": 16},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "Lora, DoRA": {"use_dora": True, "target_modules": ["embed_tokens", *QV]},
    "Lora, tokens": {"trainable_token_indices": [4, 5, 6]},
    "Lora, saved modules": {"modules_to_save": ["lm_head"]},
    "Lora, all layers": {"target_modules": "all-linear"},
    "Lora, whole parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}
"""What a method must be told, or is asked besides."""
NO_METHODS = {"Peft", "PromptLearning", "LoraRuntime", "LoftQ", "Eva", "Arrow", "LoraGA"}


def adapted(name: str) -> nn.Module:
    """In eval mode, for some draw random numbers in training; nothing where it began, where parts have no gradient."""
    config_class = getattr(peft, f"{name.partition(',')[0]}Config")
    known = config_class.__dataclass_fields__
    usual = {"target_modules": QV, "r": 4, "task_type": "CAUSAL_LM"}
    if name == "OFT":
        del usual["r"]
    options = {k: v for k, v in usual.items() if k in known} | ASKED.get(name, {})
    torch.manual_seed(0)
    try:
        model = peft.get_peft_model(transformers.LlamaForCausalLM(configured("llama")), config_class(**options)).eval()
    except Exception as error:
        raise LeftOutError(f"not built: {type(error).__name__}") from error
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and p.is_floating_point():
                p += 0.1 * torch.randn_like(p)
    return model


def given_loss(model: Callable, ids: Tensor) -> Tensor:
    """Of the tokens that were given; a model may put its own before them."""
    logits = model(input_ids=ids).logits[:, -ids.shape[1] : -1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


METHODS = sorted({name.removesuffix("Config") for name in dir(peft) if name.endswith("Config")} - NO_METHODS)
MODELS: list[Use] = [
    use(f"peft {name}", partial(adapted, name), lambda: tokens(9), given_loss)
    for name in [*METHODS, *(name for name in ASKED if "," in name)]
]
