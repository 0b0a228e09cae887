"""Models of diffusers for coverage.py: denoisers, autoencoders and what steers them, built small."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from coverage_cases import Use
from coverage_models import B, small, use
from torch import Tensor

diffusers.logging.set_verbosity_error()

SIZE, TEXT, POOLED = (4, 8, 8), (5, 12), (10,)
"""An image, the words and the sentence of a sample."""


def sample_loss(model: Callable, *batch: Tensor, inputs: tuple[str, ...], output: str) -> Tensor:
    """Curved, so that no gradient is the same everywhere; the first of the batch has no name."""
    first, *others = batch
    out = getattr(model(first, **dict(zip(inputs, others, strict=True))), output).flatten(1)
    return (out * torch.arange(out.shape[1]).cos() + 0.1 * out.square()).sum(1)


def batch_of(first: tuple[int, ...], inputs: tuple[str, ...]) -> tuple[Tensor, ...]:
    drawn = {
        "timestep": lambda: torch.randint(1000, (B,)),
        "class_labels": lambda: torch.randint(10, (B,)),
        "encoder_hidden_states": lambda: torch.randn(B, *TEXT),
        "pooled_projections": lambda: torch.randn(B, *POOLED),
        "proj_embedding": lambda: torch.randn(B, 12),
        "controlnet_cond": lambda: torch.randn(B, 3, 16, 16),
    }
    return torch.randn(B, *first), *(drawn[name]() for name in inputs)


MODELS: list[Use] = []


def model(name: str, *inputs: str, first: tuple[int, ...] = SIZE, output: str = "sample", **sizes: Any) -> None:
    MODELS.append(
        use(
            f"diffusers {name}",
            lambda: small(lambda: getattr(diffusers, name)(**sizes)),
            partial(batch_of, first, inputs),
            partial(sample_loss, inputs=inputs, output=output),
        )
    )


BLOCKS: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 4}
UNET: dict[str, Any] = {**BLOCKS, "sample_size": 8, "layers_per_block": 1, "attention_head_dim": 8}
CODER: dict[str, Any] = {
    **BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2
}  # fmt: skip
CROSS: dict[str, Any] = {
    **UNET, "cross_attention_dim": 12, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
PATCHES: dict[str, Any] = {**HEADS, "in_channels": 4, "sample_size": 8, "patch_size": 2}
JOINT: dict[str, Any] = {"joint_attention_dim": 12, "caption_projection_dim": 16}
IMAGE = (3, 8, 8)

model(
    "UNet2DModel", "timestep", first=IMAGE, **UNET, in_channels=3, out_channels=3,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
model("UNet2DConditionModel", "timestep", "encoder_hidden_states", **CROSS)
model(
    "UNet3DConditionModel", "timestep", "encoder_hidden_states", first=(4, 2, 8, 8), **UNET, cross_attention_dim=12,
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
)  # fmt: skip
model(
    "ControlNetModel", "timestep", "encoder_hidden_states", "controlnet_cond", output="mid_block_res_sample",
    **{k: v for k, v in CROSS.items() if k not in ("sample_size", "up_block_types")}, conditioning_embedding_out_channels=(8, 16),
)  # fmt: skip
model("AutoencoderKL", first=IMAGE, **CODER)
model("VQModel", first=IMAGE, **CODER, num_vq_embeddings=16)
model("DiTTransformer2DModel", "timestep", "class_labels", **PATCHES, num_embeds_ada_norm=10)
model(
    "PixArtTransformer2DModel", "encoder_hidden_states", "timestep", **PATCHES, out_channels=8, caption_channels=12,
    cross_attention_dim=16, use_additional_conditions=False,
)  # fmt: skip
model(
    "SD3Transformer2DModel", "encoder_hidden_states", "pooled_projections", "timestep", **PATCHES, **JOINT, out_channels=4,
    pooled_projection_dim=10,
)  # fmt: skip
model(
    "AuraFlowTransformer2DModel", "encoder_hidden_states", "timestep", **{k: v for k, v in PATCHES.items() if k != "num_layers"},
    **JOINT, num_mmdit_layers=1, num_single_dit_layers=1, out_channels=4, pos_embed_max_size=64,
)  # fmt: skip
model(
    "SanaTransformer2DModel", "encoder_hidden_states", "timestep", **HEADS, in_channels=4, out_channels=4, sample_size=8,
    num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=12,
)  # fmt: skip
model(
    "WanTransformer3DModel", "timestep", "encoder_hidden_states", first=(4, 2, 8, 8), patch_size=(1, 2, 2), num_attention_heads=2,
    attention_head_dim=12, in_channels=4, out_channels=4, text_dim=12, freq_dim=16, ffn_dim=32, num_layers=1, rope_max_seq_len=32,
)  # fmt: skip
model(
    "CogVideoXTransformer3DModel", "encoder_hidden_states", "timestep", first=(2, 4, 8, 8), **HEADS, in_channels=4, out_channels=4,
    time_embed_dim=8, text_embed_dim=12, sample_width=8, sample_height=8, sample_frames=5, patch_size=2, max_text_seq_length=5,
)  # fmt: skip
model(
    "Transformer2DModel", "encoder_hidden_states", first=(8, 4, 4), **HEADS, in_channels=8, norm_num_groups=4,
    cross_attention_dim=12,
)  # fmt: skip
model(
    "PriorTransformer", "timestep", "proj_embedding", "encoder_hidden_states", first=(12,), output="predicted_image_embedding",
    **HEADS, embedding_dim=12, num_embeddings=5, additional_embeddings=4,
)  # fmt: skip
