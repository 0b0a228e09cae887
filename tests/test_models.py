"""Models as people have them, from configs with random weights, against the oracle: gradients, norms and clipped sums."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import peft
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers as hf
from cases import Fn
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torchvision.models import convnext
from torchvision.models.resnet import BasicBlock

import samplewise as sw
from samplewise import SamplesMixError, SamplewiseError, UnattributedError
from samplewise.testing import assert_matches_oracle, oracle, relative_error, relative_errors, run_capture

B, T, V = 3, 7, 50
TOLERANCE = 1e-9  # float64, sums of at most a few thousand terms

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),  # nn.Transformer, about its fast path
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning"),  # DeBERTa scripts some functions
]


# --- losses and batches ------------------------------------------------------------------------------------------------------


def curved(out: Tensor) -> Tensor:
    """One loss a sample whose gradient differs in every entry, also of an output that a LayerNorm holds at a fixed norm."""
    out = out.flatten(1)
    return ((out + 0.3 * out.square()) * torch.arange(out.shape[1]).cos()).sum(1)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, a mean over each sample's own positions."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


def out_loss(model: nn.Module, *batch: Any) -> Tensor:
    return curved(model(*batch))


def class_loss(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out = getattr(out, "logits", out)
    return F.cross_entropy(out, out.new_zeros(len(out), dtype=torch.long), reduction="none")


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return token_loss(model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])


def masked_loss(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits
    losses = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)
    return losses.mean(1) if mask is None else (losses * mask).sum(1) / mask.sum(1)


def seq2seq_loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    name = "input_ids" if source.dtype == torch.long else "input_features"
    return token_loss(model(**{name: source}, decoder_input_ids=target, use_cache=False).logits, target)


def tokens(length: int = T) -> Tensor:
    return torch.randint(V, (B, length))


def padding() -> Tensor:
    return (torch.arange(T) < torch.tensor([[7], [4], [2]])).long()


# --- the table ---------------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    name: str
    make: Callable[[], nn.Module]
    loss_fn: Callable[..., Tensor]
    batch: Callable[[], tuple]
    dtype: torch.dtype = torch.float64
    tolerance: float = TOLERANCE
    options: dict[str, Any] = field(default_factory=dict)
    truth: Callable[[nn.Module], nn.Module] = lambda model: model
    """The model that the oracle runs, where the one captured has no float64."""


MODELS: list[Model] = []


def model(name: str, make: Callable[[], nn.Module], loss_fn: Callable[..., Tensor], *batch: Callable, **more: Any) -> None:
    MODELS.append(Model(name, make, loss_fn, lambda: tuple(part() for part in batch), **more))


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


# --- Hugging Face ---


def gpt2(**more: Any) -> nn.Module:
    sizes = {
        "vocab_size": V,
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **more))


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.BertConfig(
        vocab_size=V, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
    )
    return hf.BertForMaskedLM(config)


LLAMA = {
    "vocab_size": V, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip


def llama(**more: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, **more))


def t5() -> nn.Module:
    config = hf.T5Config(vocab_size=V, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0)
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **sizes))


def mixtral(experts: str) -> nn.Module:
    net = hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **LLAMA))
    net.set_experts_implementation(experts)
    return net


def eager_experts(net: nn.Module) -> nn.Module:
    twin = mixtral("eager")
    twin.load_state_dict(net.state_dict())
    return twin


def whisper() -> nn.Module:
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
              {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}  # fmt: skip
    config = hf.WhisperConfig(
        vocab_size=V, d_model=8, num_mel_bins=4, max_source_positions=10, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[], **layers,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def roberta() -> nn.Module:
    """Positions counted from the tokens, token types gathered by them."""
    return hf.RobertaForMaskedLM(hf.RobertaConfig(vocab_size=V, max_position_embeddings=20, **SMALL, **NO_DROPOUT))


def deberta() -> nn.Module:
    """Attention over tables of relative positions that pass through the layers' own projections."""
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    config = hf.DebertaV2Config(vocab_size=V, max_position_embeddings=16, **relative, **SMALL, **NO_DROPOUT)
    return hf.DebertaV2ForMaskedLM(config)


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=V, hidden_size=8, num_hidden_layers=1, state_size=4))


def wav2vec2() -> nn.Module:
    """A weight-normed convolution of positions over features of the raw wave."""
    convs = {"conv_dim": (4, 4), "conv_stride": (5, 4), "conv_kernel": (10, 4), "feat_extract_norm": "layer"}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = hf.Wav2Vec2Config(vocab_size=V, mask_time_prob=0, layerdrop=0, **convs, **positions, **SMALL)
    return hf.Wav2Vec2ForCTC(config).eval()


def logits_loss(net: nn.Module, x: Tensor) -> Tensor:
    return curved(net(x).logits)


model("gpt2", gpt2, next_token_loss, tokens)
model("gpt2-eager-attention", lambda: gpt2(attn_implementation="eager"), next_token_loss, tokens)
model("gpt2-padded", gpt2, masked_loss, tokens, padding)
model("gpt2-T-is-B", gpt2, next_token_loss, lambda: tokens(B))
model("bert", bert, masked_loss, tokens)
model("bert-padded", bert, masked_loss, tokens, padding)
model("llama", llama, next_token_loss, tokens)
model("llama-tied", lambda: llama(tie_word_embeddings=True), next_token_loss, tokens)
model("llama-padded", llama, masked_loss, tokens, padding)
model("t5", t5, seq2seq_loss, tokens, lambda: tokens(5))
model("vit", vit, class_loss, normal(B, 3, 8, 8))
model("mixtral-eager", lambda: mixtral("eager"), next_token_loss, tokens)
model("mixtral-batched", lambda: mixtral("batched_mm"), next_token_loss, tokens)
# torch's grouped_mm has no float64; float32 rounds at 6e-8, a few layers and a few hundred terms make 1e-4 of it at worst
model("mixtral-grouped", lambda: mixtral("grouped_mm"), next_token_loss, tokens,
      dtype=torch.float32, tolerance=1e-4, truth=eager_experts)  # fmt: skip
model("roberta", roberta, masked_loss, tokens)
model("deberta", deberta, masked_loss, tokens)
# it takes exp and softplus in float32 whatever its weights are
model("mamba", mamba, next_token_loss, tokens, tolerance=1e-5)
model("wav2vec2", wav2vec2, logits_loss, normal(B, 200))
model("whisper", whisper, seq2seq_loss, normal(B, 4, 20), lambda: tokens(5))


# --- peft: adapters, which alone are trained ---


def adapted(net: nn.Module, config: Any) -> nn.Module:
    net = peft.get_peft_model(net, config)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn_like(p)  # adapters start where parts of them have no gradient
    return net


def lora(net: nn.Module, *targets: str) -> nn.Module:
    fan = targets[0].startswith("c_")  # GPT-2 keeps its weights transposed
    return adapted(
        net, peft.LoraConfig(r=2, lora_alpha=4, target_modules=list(targets), fan_in_fan_out=fan, lora_dropout=0.0)
    )


def adapters_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Of the tokens that were given; a model may put its own before them."""
    return token_loss(model(input_ids=ids, use_cache=False).logits[:, -T:-1], ids[:, 1:])


QV = ["q_proj", "v_proj"]
ADAPTERS = {
    "dora": lambda: peft.LoraConfig(r=2, use_dora=True, target_modules=["embed_tokens", *QV]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=2, total_step=10, target_modules=QV),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=QV),
    "hra": lambda: peft.HRAConfig(r=2, target_modules=QV),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=QV),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=4, task_type="CAUSAL_LM"),
}
for kind, config in ADAPTERS.items():
    model(f"llama-{kind}", lambda config=config: adapted(llama(), config()), adapters_loss, tokens)
model(
    "conv-hra",  # calls F.conv2d by the names of its arguments
    lambda: adapted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), peft.HRAConfig(r=2, target_modules=["0"])),
    out_loss,
    normal(B, 3, 6, 6),
)
model("gpt2-lora", lambda: lora(gpt2(), "c_attn", "c_proj"), next_token_loss, tokens)
model("llama-lora", lambda: lora(llama(), "q_proj", "v_proj", "down_proj"), next_token_loss, tokens)


# --- diffusers ---


def steps() -> Tensor:
    """Of noise, one a sample."""
    return torch.tensor([3, 500, 20])


def sample_loss(model: nn.Module, *batch: Any) -> Tensor:
    return curved(model(*batch).sample)


DOWN_UP = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4}
UNET = {**BLOCKS, "sample_size": 8, "layers_per_block": 1, "attention_head_dim": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8, "patch_size": 2, "in_channels": 4}


def unet() -> nn.Module:
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return diffusers.UNet2DModel(**UNET, in_channels=3, out_channels=3, down_block_types=down, up_block_types=up)


def unet_for_text() -> nn.Module:
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    return diffusers.UNet2DConditionModel(**UNET, cross_attention_dim=6, down_block_types=down, up_block_types=up)


def sd3() -> nn.Module:
    widths = {"joint_attention_dim": 6, "caption_projection_dim": 16, "pooled_projection_dim": 5}
    return diffusers.SD3Transformer2DModel(**HEADS, **widths, num_layers=2, out_channels=4)


def flux() -> nn.Module:
    widths = {"joint_attention_dim": 6, "pooled_projection_dim": 5, "num_attention_heads": 2, "attention_head_dim": 8}
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, axes_dims_rope=(2, 2, 4), **widths
    )


def flux_loss(model: nn.Module, x: Tensor, text: Tensor, pooled: Tensor, t: Tensor) -> Tensor:
    places = {"img_ids": torch.zeros(x.shape[1], 3), "txt_ids": torch.zeros(text.shape[1], 3)}
    out = model(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t.to(x.dtype) / 1000, **places)
    return curved(out.sample)


model("unet", unet, sample_loss, normal(B, 3, 8, 8), steps)
model("unet-for-text", unet_for_text, sample_loss, normal(B, 4, 8, 8), steps, normal(B, 5, 6))
model("autoencoder", lambda: diffusers.AutoencoderKL(**BLOCKS, **DOWN_UP), sample_loss, normal(B, 3, 8, 8))
model(
    "vector-quantizer", lambda: diffusers.VQModel(**BLOCKS, **DOWN_UP, num_vq_embeddings=8), sample_loss, normal(B, 3, 8, 8)
)
model(
    "dit",
    lambda: diffusers.DiTTransformer2DModel(
        **HEADS, num_layers=2, num_embeds_ada_norm=10
    ).eval(),  # it drops classes in training
    lambda model, x, t, y: curved(model(x, timestep=t, class_labels=y).sample),
    normal(B, 4, 8, 8),
    steps,
    lambda: torch.randint(10, (B,)),
)
model("sd3", sd3, sample_loss, normal(B, 4, 8, 8), normal(B, 5, 6), normal(B, 5), steps)
model("flux", flux, flux_loss, normal(B, 6, 4), normal(B, 5, 6), normal(B, 5), steps, options={"batch_size": B})


# --- vision ---


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def resnet(norm: Callable[[int], nn.Module] = group_norm) -> nn.Module:
    """torchvision's ResNet with one block a stage; the stock widths are cut, since they alone make it slow."""
    net = torchvision.models.ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=norm, num_classes=3)
    net.inplanes = 4
    net.conv1, net.bn1 = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), norm(4)
    for k, width in enumerate((4, 4, 8, 8)):
        setattr(net, f"layer{k + 1}", net._make_layer(BasicBlock, width, 1, stride=1 + (k > 0)))
    net.fc = nn.Linear(8, 3)
    return net


def small_convnext() -> nn.Module:
    blocks = [convnext.CNBlockConfig(4, 8, 1), convnext.CNBlockConfig(8, None, 1)]
    return convnext.ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=3)


def vision_transformer() -> nn.Module:
    net = torchvision.models.VisionTransformer(8, 4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3)
    nn.init.normal_(net.heads.head.weight)  # it starts at zero, and nothing below it has a gradient
    return net


def timm_vit() -> nn.Module:
    """Registers, normed queries and keys, scaled residuals, pooled by a mean."""
    return timm.models.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, num_classes=3, init_values=0.1, qk_norm=True,
        reg_tokens=2, global_pool="avg",
    )  # fmt: skip


def timm_swin() -> nn.Module:
    """Shifted windows folded into the batch, with a table of relative positions."""
    return timm.models.SwinTransformer(
        img_size=16,
        patch_size=2,
        embed_dim=4,
        depths=(2, 2),
        num_heads=(1, 2),
        window_size=2,
        num_classes=3,
        drop_path_rate=0,
    )


class UNet(nn.Module):
    """Down and up again with transposed convolutions, joined across by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU(inplace=True))
        self.down1, self.down2, self.middle = block(3, 4), block(4, 6), block(6, 8)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.join2, self.join1 = block(12, 6), block(8, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        h = self.middle(F.max_pool2d(two, 2))
        h = self.join2(torch.cat([self.up2(h), two], 1))
        h = self.join1(torch.cat([self.up1(h), one], 1))
        return self.head(h)


model("resnet", resnet, class_loss, normal(B, 3, 32, 32))
model("resnet-batch-norm-eval", lambda: resnet(nn.BatchNorm2d).eval(), class_loss, normal(B, 3, 32, 32))
model("convnext", small_convnext, class_loss, normal(B, 3, 16, 16))
model("torchvision-vit", vision_transformer, class_loss, normal(B, 3, 8, 8))
model("timm-vit", timm_vit, class_loss, normal(B, 3, 8, 8))
model("timm-swin", timm_swin, class_loss, normal(B, 3, 16, 16))
model("unet", UNet, out_loss, normal(B, 3, 8, 8))


# --- packed sequences ---


class Tagger(nn.Module):
    def __init__(self, *, is_sorted: bool, batch_first: bool = True):
        super().__init__()
        self.is_sorted, self.batch_first = is_sorted, batch_first
        self.embed = nn.Embedding(V, 4)
        self.lstm = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=batch_first)
        self.head = nn.Linear(10, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=self.batch_first, enforce_sorted=self.is_sorted)
        out, _ = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=self.batch_first, total_length=ids.shape[1])
        return self.head(out if self.batch_first else out.transpose(0, 1))


class Last(Tagger):
    """Classifies by the last hidden states, which come in the caller's order."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=self.is_sorted)
        _, (h, c) = self.lstm(packed)
        return self.head(torch.cat([h[-2] + c[-2], h[-1]], 1))


def tag_loss(net: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
    logits = net(ids, lengths)
    losses = F.cross_entropy(logits.flatten(0, 1), (ids % 3).flatten(), reduction="none").view(ids.shape)
    return (losses * (torch.arange(ids.shape[1]) < lengths[:, None])).sum(1)


falling, jumbled = lambda: torch.tensor([7, 4, 2]), lambda: torch.tensor([4, 7, 2])
model("tagger-sorted", lambda: Tagger(is_sorted=True), tag_loss, tokens, falling)
model("tagger-jumbled", lambda: Tagger(is_sorted=False), tag_loss, tokens, jumbled)
model("tagger-time-first", lambda: Tagger(is_sorted=False, batch_first=False), tag_loss, tokens, jumbled)
model("last-state-jumbled", lambda: Last(is_sorted=False), out_loss, tokens, jumbled)


# --- embedding bags ---


class DLRM(nn.Module):
    """Dense features through an MLP, bags of ids through tables, dot products of all pairs, an MLP on top."""

    def __init__(self, bags: str):
        super().__init__()
        self.bags = bags
        self.bottom = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
        self.tables = nn.ModuleList(nn.EmbeddingBag(V, 5, mode=mode) for mode in ("sum", "mean"))
        self.top = nn.Sequential(nn.Linear(5 + 3, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, dense: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        if self.bags == "2-D":
            looked_up = [table(ids) for table in self.tables]
        else:
            flat = ids[torch.arange(ids.shape[1]) < lengths[:, None]]
            offsets = lengths.cumsum(0) - lengths
            looked_up = [table(flat, offsets) for table in self.tables]
        vectors = torch.stack([self.bottom(dense), *looked_up], 1)
        i, j = torch.triu_indices(3, 3, offset=1)
        products = (vectors @ vectors.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([vectors[:, 0], products], 1))


model("dlrm", lambda: DLRM("2-D"), out_loss, normal(B, 4), tokens, jumbled)
model("dlrm-offsets", lambda: DLRM("offsets"), out_loss, normal(B, 4), tokens, jumbled)


# --- transformers of torch ---


class SetModel(nn.Module):
    """As DETR: learned queries, the same for every image, ask the features of the image."""

    def __init__(self, *, batch_first: bool):
        super().__init__()
        self.batch_first = batch_first
        self.backbone = nn.Conv2d(3, 8, 4, stride=4)
        self.queries, self.positions = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(4, 8))
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.classes, self.boxes = nn.Linear(8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.backbone(x).flatten(2).transpose(1, 2) + self.positions
        if self.batch_first:
            h = self.decoder(self.queries.expand(len(x), -1, -1), memory)
        else:
            h = self.decoder(self.queries[:, None].repeat(1, len(x), 1), memory.transpose(0, 1)).transpose(0, 1)
        return torch.cat([self.classes(h), self.boxes(h).sigmoid()], -1)


def transformer(*, training: bool, batch_first: bool) -> nn.Module:
    net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=batch_first)

    def forward(s: Any, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        if batch_first:
            return s.net(source, target, tgt_mask=mask, tgt_is_causal=True)
        return s.net(source.transpose(0, 1), target.transpose(0, 1), tgt_mask=mask).transpose(0, 1)

    return Fn(forward, net=net).train(training)


model("set-model", lambda: SetModel(batch_first=True), out_loss, normal(B, 3, 8, 8))
model("set-model-batch-second", lambda: SetModel(batch_first=False), out_loss, normal(B, 3, 8, 8))
for training in (True, False):
    for batch_first in (True, False):
        name = f"transformer-{'train' if training else 'eval'}{'' if batch_first else '-batch-second'}"
        make = lambda training=training, batch_first=batch_first: transformer(training=training, batch_first=batch_first)
        model(name, make, out_loss, normal(B, T, 8), normal(B, 5, 8))


# --- the tests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers():
    """(captured gradients, oracle) of a model, computed once."""
    known = {}

    def of(case: Model):
        if case.name not in known:
            torch.manual_seed(0)
            net, batch = case.make().to(case.dtype), case.batch()
            batch = tuple(t.to(case.dtype) if t.is_floating_point() else t for t in batch)
            grads = run_capture(net, case.loss_fn, *batch, **case.options)
            assert all(p.grad is None for p in net.parameters())
            known[case.name] = grads, oracle(case.truth(net), case.loss_fn, *batch)
        return known[case.name]

    return of


def norms_of(truth: dict[str, Tensor]) -> Tensor:
    return torch.cat([G.flatten(1) for G in truth.values()], 1).norm(dim=1)


def materialized(grads, truth):
    return grads.materialize(), truth


def norms(grads, truth):
    return {"": grads.norms()}, {"": norms_of(truth)}


def clipped_sum(grads, truth):
    bound = norms_of(truth).median().item()
    w = (bound / norms_of(truth)).clamp(max=1)
    return grads.clipped_sum(max_norm=bound), {name: torch.tensordot(w, G, 1) for name, G in truth.items()}


@pytest.mark.parametrize("query", [materialized, norms, clipped_sum])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in MODELS])
def test_model_matches_oracle(case, query, answers):
    got, expected = query(*answers(case))
    assert got.keys() == expected.keys()
    for name, error in relative_errors(got, expected).items():
        assert error < case.tolerance, name


# --- what the table does not hold ---


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_check_is_not_misled_by_gradients_that_are_zero_but_for_rounding(dtype, tolerance):
    net, ids = bert().to(dtype), tokens()
    assert_matches_oracle(net, masked_loss, ids, tolerance=tolerance)
    truth = oracle(net, masked_loss, ids)
    (name,) = (name for name in truth if name.endswith("0.attention.self.key.bias"))
    assert truth[name].abs().max() < 1e-12  # a softmax does not see the bias of its keys
    assert relative_errors({**truth, name: truth[name] + 1e-3}, truth)[name] > tolerance


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_does_not_hide_another(value):
    truth = {"a": torch.tensor([value]), "b": torch.tensor([1.0])}
    assert relative_errors({**truth, "b": torch.tensor([2.0])}, truth) == {"a": float("inf"), "b": 1.0}


def test_loss_inside_a_hugging_face_model():
    net, ids = gpt2(loss_type="ForCausalLM").double(), tokens()
    with sw.capture(net, loss_reduction="mean") as grads:
        net(input_ids=ids, labels=ids).loss.backward()
    for name, G in oracle(net, next_token_loss, ids).items():
        assert relative_error(grads[name].materialize(), G) < 1e-5, name  # the model takes its loss in float32


def test_loss_inside_a_hugging_face_model_over_unequal_lengths_is_refused():
    net, ids = gpt2(loss_type="ForCausalLM").double(), tokens()
    labels = ids.masked_fill(padding() == 0, -100)
    with sw.capture(net, loss_reduction="mean"), pytest.raises(SamplesMixError, match="does not weigh all samples alike"):
        net(input_ids=ids, labels=labels).loss.backward()


def test_bags_given_by_offsets():
    """Ids of all bags in a row do not show where a sample ends, so a sample cannot be run alone and is not verified."""
    net = Fn(lambda s, x, ids, offsets: s.table(ids, offsets) * x, table=nn.EmbeddingBag(V, 4)).double()
    x, ids, offsets = torch.randn(B, 4).double(), torch.randint(V, (9,)), torch.tensor([0, 3, 7])
    with sw.capture(net, batch_size=B, verify=False) as grads:
        grads.backward(net(x, ids, offsets).square().sum(1))
    for b, bag in enumerate(ids.split([3, 4, 2])):
        loss = net(x[b : b + 1], bag, torch.tensor([0])).square().sum()
        (G,) = torch.autograd.grad(loss, net.table.weight)
        assert relative_error(grads["table.weight"].materialize()[b], G) < TOLERANCE
    with sw.capture(net), pytest.raises(UnattributedError, match=r"sizes \[3, 9\]"):
        net(x, ids, offsets)
    with sw.capture(net, batch_size=B), pytest.raises(SamplewiseError, match="verify=False"):
        net(x, ids, offsets)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [gpt2, llama, bert, t5], ids=["gpt2", "llama", "bert", "t5"])
@pytest.mark.filterwarnings("ignore:.*use_cache=True.*")
def test_gradient_checkpointing(make, reentrant):
    net, ids = make().double().train(), tokens()
    loss_fn = {bert: masked_loss, t5: lambda net, ids: seq2seq_loss(net, ids, ids)}.get(make, next_token_loss)
    truth = oracle(net, loss_fn, ids)
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        net.enable_input_require_grads()
    if reentrant and make is t5:  # a block hands its table of positions on to the next, through a checkpoint that hides it
        with sw.capture(net), pytest.raises(UnattributedError, match=r"relative_attention_bias\.weight"):
            loss_fn(net, ids).sum().backward()
        return
    grads = run_capture(net, loss_fn, ids)
    assert set(grads) == set(truth)
    largest = max(float(G.abs().max()) for G in truth.values())
    for name, G in truth.items():
        assert (grads[name].materialize() - G).abs().max() < TOLERANCE * largest, name
