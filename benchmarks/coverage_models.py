"""Published architectures for coverage.py: of each family of timm and torchvision, of each type of transformers.

They are built small, with random weights and without dropout, in eval mode, since batch norms mix samples in training. In float64.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers
from coverage_cases import Use
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

transformers.logging.set_verbosity_error()

B, NUM_CLASSES, VOCABULARY = 3, 5, 100
PIXELS = (64, 96, 128, 224, 256)
MAX_PARAMETERS = 30_000_000
SMALL_FIRST = "atto femto pico nano tiny mini xxs _xs _050 _b0 18 small _s".split()
"""What small models are called, smallest first."""


class LeftOutError(Exception):
    """The architecture cannot be built small, or does not run in float64."""


def small(make: Callable[[], nn.Module]) -> nn.Module:
    """The model in eval mode, biases and scales not at their first values; it is sized up before memory is taken."""
    with torch.device("meta"):
        num = sum(p.numel() for p in make().parameters())
    if num > MAX_PARAMETERS:
        raise LeftOutError(f"{num / 1e6:.0f} million parameters")
    torch.manual_seed(0)  # the same model, whatever was tried before
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1 and p.is_floating_point():
                p += 0.05 * torch.randn_like(p)
    return model


def runs(model: nn.Module, *inputs: Tensor) -> bool:
    try:
        with torch.no_grad():
            model(*inputs)
        return True
    except Exception:
        return False


def use(name: str, make: Callable[[], nn.Module], batch: Callable[[], tuple], loss_fn: Callable[..., Tensor]) -> Use:
    return Use(name, make, batch, loss_fn, right="as the model", tolerance=1e-3)


# --- images -------------------------------------------------------------------------------------------------------------------------


def class_loss(model: Callable, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(getattr(out, "logits", out), y, reduction="none")


def labels() -> Tensor:
    return torch.randint(NUM_CLASSES, (B,))


class Images:
    """An architecture and images of the first size that it takes."""

    def __init__(self, make: Callable[..., nn.Module]):
        self.make, self.size = partial(make, num_classes=NUM_CLASSES), 0

    def model(self) -> nn.Module:
        if not self.size:
            self.size, self.make = next(self.fitting(), (0, self.make))
        if not self.size:
            raise LeftOutError(f"takes no image of {PIXELS} pixels")
        return small(self.make)

    def fitting(self) -> Iterator[tuple[int, Callable[[], nn.Module]]]:
        for size in PIXELS:
            for options in ({"img_size": size}, {"image_size": size}, {}):
                make = partial(self.make, **options)
                try:
                    model = small(make)
                except (TypeError, ValueError, AssertionError, RuntimeError):
                    continue
                if runs(model, torch.randn(1, 3, size, size)):
                    yield size, make

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(B, 3, self.size, self.size), labels()


def smallest(names: list[str]) -> str:
    """The name that says most plainly that the model is small."""
    rank = lambda name: min((i for i, word in enumerate(SMALL_FIRST) if word in name), default=len(SMALL_FIRST))
    return min(names, key=lambda name: (rank(name), len(name), name))


def image_models() -> Iterator[Use]:
    for module in timm.list_modules():
        if names := timm.list_models(module=module):
            name = smallest(names)
            images = Images(partial(timm.create_model, name))
            yield use(f"timm {name}", images.model, images.batch, class_loss)
    families: dict[str, list[str]] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        families.setdefault(inspect.getmodule(torchvision.models.get_model_builder(name)).__name__, []).append(name)  # type: ignore[union-attr]
    for names in families.values():
        name = smallest(names)
        images = Images(partial(torchvision.models.get_model, name, weights=None))
        yield use(f"torchvision {name}", images.model, images.batch, class_loss)


# --- transformers -------------------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    **dict.fromkeys("hidden_size d_model n_embd dim emb_dim embed_dim embedding_size word_embed_proj_dim lru_width".split(), 32),
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers".split(), 2
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads".split(), 4
    ),
    **dict.fromkeys("head_dim d_kv d_head attention_head_size qk_rope_head_dim qk_nope_head_dim v_head_dim".split(), 8),
    **dict.fromkeys(
        "intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim d_inner moe_intermediate_size "
        "shared_expert_intermediate_size".split(),
        48,
    ),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts".split(), 4),
    **dict.fromkeys("n_group topk_group first_k_dense_replace n_shared_experts mamba_n_groups".split(), 1),
    **dict.fromkeys("max_position_embeddings n_positions max_seq_len seq_length".split(), 64),
    **dict.fromkeys("q_lora_rank kv_lora_rank".split(), 16),
    **dict.fromkeys("mamba_n_heads mamba_d_head mamba_d_state state_size".split(), 8),
    **dict.fromkeys("image_size".split(), 64),
    "rotary_dim": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": VOCABULARY,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""What configurations call their sizes."""

ROUTES = "layer_types layers_block_type attention_layers mlp_layer_types".split()
"""A kind for each layer: one layer of each is kept, two in all."""


def configured(model_type: str) -> Any:
    """The configuration with every size that it has made small."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    fits = lambda name, value: name in default and type(default[name]) in (type(value), type(None))
    chosen = {name: value for name, value in SIZES.items() if fits(name, value)}
    for name in ROUTES:
        kinds = default.get(name)
        if isinstance(kinds, list | tuple) and kinds:
            chosen[name] = [*dict.fromkeys(kinds), kinds[0]][:2]
    if "kv_lora_rank" in chosen:  # keys and values of each head come from one vector
        chosen["num_key_value_heads"] = SIZES["num_attention_heads"]
    config = config_class(**chosen, num_labels=NUM_CLASSES)
    config._experts_implementation = "eager"  # torch's grouped product has no float64
    return config


def text_model(class_name: str, model_type: str) -> nn.Module:
    return small(lambda: getattr(transformers, class_name)(configured(model_type)))


def tokens(*lengths: int) -> tuple[Tensor, ...]:
    return tuple(torch.randint(3, VOCABULARY, (B, T)) for T in lengths)


def token_loss(model: Callable, x: Tensor, *y: Tensor) -> Tensor:
    """Of the next token; y is what a decoder reads."""
    more = {"decoder_input_ids": y[0]} if y else {}
    logits = model(input_ids=x, **more).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), (y[0] if y else x)[:, 1:], reduction="none").sum(1)


def text_loss(model: Callable, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=x).logits, y, reduction="none")


def image_loss(model: Callable, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(pixel_values=x).logits, y, reduction="none")


TASKS: list[tuple[Any, Callable[[], tuple], Callable[..., Tensor]]] = [
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, lambda: tokens(9), token_loss),
    (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, lambda: tokens(9, 7), token_loss),
    (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, lambda: tokens(9), token_loss),
    (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, lambda: (*tokens(9), labels()), text_loss),
    (modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, lambda: (torch.randn(B, 3, 64, 64), labels()), image_loss),
]


def transformer_models() -> Iterator[Use]:
    """One class of each type of model, for the first task that it is there for."""
    seen = set()
    for classes, batch, loss_fn in TASKS:
        for model_type, names in classes.items():
            name = names if isinstance(names, str) else names[0]
            if seen.isdisjoint((model_type, name)) and hasattr(transformers, name):
                seen |= {model_type, name}
                yield use(f"transformers {name}", partial(text_model, name, model_type), batch, loss_fn)


MODELS = [*image_models(), *transformer_models()]
