"""The rows of the GPU benchmark: a model, its batch and one loss a sample, at the size that is timed and at smaller ones."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Sizes = dict[str, int]


@dataclass(frozen=True)
class Row:
    """One row: `model(**sizes)` on `batch(**sizes)`; sizes other than B are the model's own."""

    name: str
    title: str
    model: Callable[..., nn.Module]
    batch: Callable[..., Batch]
    loss_fn: Callable[..., Tensor]
    """loss_fn(model, *batch): one loss a sample, [B]."""
    full: Sizes
    """What is timed."""
    small: Sizes
    """What differs from it where numbers are compared with the oracle: the widths stay, depth and positions shrink."""
    tiny: Sizes
    """What differs from it where only the way is tried, on a CPU."""
    library: str
    """Where the model is from."""
    gib: float
    """GiB, about what an eager step takes on the device in bfloat16; float32 takes twice that."""
    changes: tuple[Callable[[Any], str], ...] = ()
    """What Opacus needs changed in the model, each change saying what it did."""
    ghost_change: Callable[[Any], str] | None = None
    """What Opacus's ghost clipping needs changed besides; it makes another model."""
    compiles_slowly: bool = False
    """Whether a compiler takes minutes, so that it is to begin early."""

    def sizes(self, which: str) -> Sizes:
        return {**self.full, **{"full": {}, "small": self.small, "tiny": self.tiny}[which]}

    def built(self, which: str, device: str, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
        """Model and batch, the same numbers in every process."""
        sizes = self.sizes(which)
        torch.manual_seed(0)
        with torch.device(device):
            model, batch = self.model(**sizes), self.batch(**sizes)
        batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
        return model.to(device, dtype).train(), batch


# --- batches and losses --------------------------------------------------------------------------------------------------------


def tokens(B: int, T: int, vocabulary: int, **_: int) -> Batch:
    return (torch.randint(vocabulary, (B, T)),)


def images(B: int, size: int, classes: int, **_: int) -> Batch:
    return torch.randn(B, 3, size, size), torch.randint(classes, (B,))


def next_token_loss(model: Callable[..., Any], ids_BT: Tensor) -> Tensor:
    """The mean over positions of each sample's cross entropy, in float32."""
    out = model(ids_BT)
    z_BTV = getattr(out, "logits", out)[:, :-1].float()
    losses = F.cross_entropy(z_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids_BT), -1).mean(1)


def class_loss(model: Callable[..., Any], x: Tensor, y_B: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(getattr(out, "logits", out).float(), y_B, reduction="none")


# --- models: random weights, dropout 0, attention by F.scaled_dot_product_attention ---------------------------------------------


def gpt2(layers: int, width: int, vocabulary: int, **_: int) -> nn.Module:
    """Hugging Face's GPT-2; the head is the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=1024, n_embd=width, n_layer=layers, n_head=max(width // 64, 2),
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(T: int, layers: int, width: int, vocabulary: int, **_: int) -> nn.Module:
    """Hugging Face's Llama, of the shape of Llama-3.2-1B; the head is the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(width // 64, 2)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 4, 1), max_position_embeddings=max(T, 16),
        tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama_lora(rank: int, **sizes: int) -> nn.Module:
    """Llama with peft's LoRA on every linear layer of the blocks; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(llama(**sizes), LoraConfig(r=rank, lora_alpha=rank, target_modules=names))
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zero at the start, and then every gradient of lora_A is zero too
            nn.init.normal_(p, std=0.02)
    return model


def vit(size: int, layers: int, width: int, classes: int, **_: int) -> nn.Module:
    """Hugging Face's ViT with patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(width // 64, 2), intermediate_size=4 * width,
        image_size=size, patch_size=16, num_labels=classes, attn_implementation="sdpa",
    )  # fmt: skip
    return ViTForImageClassification(config)


def resnet(block: type, blocks: tuple[int, ...], classes: int) -> Any:
    from torchvision.models import ResNet

    return ResNet(block, list(blocks), num_classes=classes, norm_layer=lambda channels: nn.GroupNorm(32, channels))


def resnet18(classes: int, blocks: int, **_: int) -> nn.Module:
    """torchvision's ResNet-18 with GroupNorm, and the stem of CIFAR: 3×3, no pooling."""
    from torchvision.models.resnet import BasicBlock

    model = resnet(BasicBlock, (min(2, blocks),) * 4, classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def resnet50(classes: int, blocks: int, **_: int) -> nn.Module:
    """torchvision's ResNet-50 with GroupNorm."""
    from torchvision.models.resnet import Bottleneck

    return resnet(Bottleneck, tuple(min(n, blocks) for n in (3, 4, 6, 3)), classes)


class RecurrentModel(nn.Module):
    """Embedding, one LSTM layer, head."""

    def __init__(self, width: int, vocabulary: int, **_: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width // 2), nn.Linear(width, vocabulary)
        self.lstm = nn.LSTM(width // 2, width, batch_first=True)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids_BT))[0])


# --- what Opacus asks of a model, so that there is a time to compare with --------------------------------------------------------


def positions_of_each_sample(model: Any) -> str:
    """Position ids [B, T] instead of [1, T], which Opacus takes for a batch of one."""

    def before(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        B, T = args[0].shape
        return args, {**kwargs, "position_ids": torch.arange(T, device=args[0].device).repeat(B, 1)}

    model.register_forward_pre_hook(before, with_kwargs=True)
    return "position ids [B, T]"


def nothing_in_place(model: nn.Module) -> str:
    """ReLUs and residual sums of a ResNet out of place."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
        if hasattr(module, "downsample"):
            module.forward = MethodType(residual, module)
    return "nothing in place"


def residual(self: Any, x: Tensor) -> Tensor:
    """The forward of torchvision's BasicBlock and Bottleneck with `out + identity` for `out += identity`."""
    pairs = [(self.conv1, self.bn1), (self.conv2, self.bn2)]
    pairs += [(self.conv3, self.bn3)] if hasattr(self, "conv3") else []
    out = x
    for conv, norm in pairs[:-1]:
        out = self.relu(norm(conv(out)))
    out = pairs[-1][1](pairs[-1][0](out))
    return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def opacus_lstm(model: Any) -> str:
    """Opacus's own LSTM, of linear layers, with the same weights and names."""
    from opacus.layers import DPLSTM

    old = model.lstm
    model.lstm = DPLSTM(old.input_size, old.hidden_size, batch_first=True).to(old.weight_ih_l0)
    model.lstm.load_state_dict(old.state_dict())
    return "DPLSTM"


def untied(model: Any) -> str:
    """A head of its own: another model, with other norms and V×D more parameters."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return "untied head"


# --- rows ----------------------------------------------------------------------------------------------------------------------

GPT2 = {"layers": 12, "width": 768, "vocabulary": 50257}
LLAMA = {"B": 4, "T": 2048, "layers": 16, "width": 2048, "vocabulary": 128256}
SMALL_TEXT = {"B": 3, "T": 32, "layers": 2, "vocabulary": 4096}
TINY_TEXT = {"B": 3, "T": 7, "layers": 1, "width": 32, "vocabulary": 64}

HF_GPT2, HF_LLAMA, HF_VIT = (f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "vit"))

ROWS = {
    row.name: row
    for row in (
        Row("gpt2-256", "GPT-2 small B16 T256", gpt2, tokens, next_token_loss, {"B": 16, "T": 256, **GPT2},
            SMALL_TEXT, TINY_TEXT, HF_GPT2, 7, (positions_of_each_sample,), untied),
        Row("gpt2-1024", "GPT-2 small B8 T1024", gpt2, tokens, next_token_loss, {"B": 8, "T": 1024, **GPT2},
            SMALL_TEXT, TINY_TEXT, HF_GPT2, 12, (positions_of_each_sample,), untied),
        Row("llama", "Llama-1B shape B4 T2048", llama, tokens, next_token_loss, LLAMA,
            {**SMALL_TEXT, "width": 1024}, TINY_TEXT, HF_LLAMA, 40, (), untied),
        Row("llama-lora", "Llama-1B shape, LoRA r16, B4 T2048", llama_lora, tokens, next_token_loss, {**LLAMA, "rank": 16},
            {**SMALL_TEXT, "width": 1024}, {**TINY_TEXT, "rank": 4}, "peft", 40),
        Row("vit", "ViT-B/16 B64", vit, images, class_loss, {"B": 64, "size": 224, "layers": 12, "width": 768, "classes": 1000},
            {"B": 3, "size": 64, "layers": 2}, {"B": 3, "size": 32, "layers": 1, "width": 32, "classes": 10}, HF_VIT, 12),
        Row("resnet18", "ResNet-18/GN 32×32 B256", resnet18, images, class_loss,
            {"B": 256, "size": 32, "blocks": 2, "classes": 10}, {"B": 3, "blocks": 1},
            {"B": 3, "size": 8, "blocks": 1}, "torchvision", 7, (nothing_in_place,)),
        Row("resnet50", "ResNet-50/GN 224×224 B32", resnet50, images, class_loss,
            {"B": 32, "size": 224, "blocks": 6, "classes": 1000}, {"B": 3, "size": 96, "blocks": 1},
            {"B": 3, "size": 32, "blocks": 1, "classes": 10}, "torchvision", 5, (nothing_in_place,),
            compiles_slowly=True),
        Row("lstm", "LSTM language model B32 T128", RecurrentModel, tokens, next_token_loss,
            {"B": 32, "T": 128, "width": 1024, "vocabulary": 10000}, {"B": 3, "T": 16}, TINY_TEXT, "torch", 3, (opacus_lstm,)),
    )
}  # fmt: skip
