"""The networks of the embedded DiT: an SD3-class transformer beside the frozen text encoders of the embedded UNet.

StableDiffusion3Pipeline without a third text encoder appends EMPTY_TOKENS text tokens of zeros. Nothing tells them
apart, so they stay alike through every block. While it is trained the transformer gets one of them, whose score is
raised by log(EMPTY_TOKENS): the attention is the same to the last term, at a tenth of the cost.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusionXLPipeline
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn, softmax
from torch.nn import functional
from transformers import CLIPTextModelWithProjection

from training.model import POOLED_WIDTH, TEXT_WIDTH, text_config

EMPTY_TOKENS = 256
"""The pipeline's default `max_sequence_length`."""
PATCH = 4
"""Latent cells per token and side: an image of 256x256 pixels is 16x16 tokens."""
SIDE_TOKENS, MOST_TOKENS = 16, 32
"""Tokens per side of a trained image, and of the largest one that there are positions for."""

DIT_CONFIG = {
    "sample_size": PATCH * SIDE_TOKENS,
    "patch_size": PATCH,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 6,
    "attention_head_dim": 40,
    "num_attention_heads": 4,
    "joint_attention_dim": TEXT_WIDTH + POOLED_WIDTH,
    "caption_projection_dim": 160,
    "pooled_projection_dim": TEXT_WIDTH + POOLED_WIDTH,
    "pos_embed_max_size": MOST_TOKENS,
}


def flow_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of the packaged pipeline: straight paths, most steps at the higher noise levels."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)


class DitNetworks(nn.Module):
    """The transformer, which is trained, and the two text encoders, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = SD3Transformer2DModel(**DIT_CONFIG)
        self.text_encoder = CLIPTextModelWithProjection(text_config(TEXT_WIDTH))
        self.text_encoder_2 = CLIPTextModelWithProjection(text_config(POOLED_WIDTH))
        for encoder in (self.text_encoder, self.text_encoder_2):
            encoder.requires_grad_(False)

    def take_text_side(self, folder: Path) -> None:
        """Take the text encoders of a packaged UNet pipeline. The first gets a projection that changes nothing."""
        pipe = StableDiffusionXLPipeline.from_pretrained(folder, variant="fp16", torch_dtype=torch.float32)
        first = getattr(pipe.text_encoder, "text_model", pipe.text_encoder)  # transformers 4 has it one level down
        self.text_encoder.text_model.load_state_dict(first.state_dict())
        nn.init.eye_(self.text_encoder.text_projection.weight)
        self.text_encoder_2.load_state_dict(pipe.text_encoder_2.state_dict())

    @torch.no_grad()
    def encode(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (B, T) to text tokens (B, T + 1, 192), one empty one at the end, and pooled embedding (B, 192)."""
        first = self.text_encoder(ids_BT, output_hidden_states=True)
        second = self.text_encoder_2(ids_BT, output_hidden_states=True)
        words = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        return functional.pad(words, (0, 0, 0, 1)), torch.cat([first[0], second[0]], -1)

    def forward(self, noisy_BCHW: Tensor, timestep_B: Tensor, ids_BT: Tensor) -> Tensor:
        """The flow (B, 4, H, W), noise minus image, at noise levels timestep / 1000 for captions as token ids."""
        words, pooled = self.encode(ids_BT)
        return self.transformer(noisy_BCHW, words, pooled, timestep_B, return_dict=False)[0]


class CountedEmptyAttention:
    """Joint attention (a diffusers processor) in which the last text token stands for EMPTY_TOKENS of them."""

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend among image tokens (B, N, C) and text tokens (B, T, C)."""
        if attention_mask is not None:
            raise ValueError("this transformer is trained without attention masks")
        image = (attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states))
        text = (layer(encoder_hidden_states) for layer in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj))
        query, key, value = (
            torch.cat(both, 1).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for both in zip(image, text, strict=True)
        )
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
        scores[..., -1] += math.log(EMPTY_TOKENS)
        seen = (softmax(scores, -1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        seen_image, seen_text = seen.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        return attn.to_out[0](seen_image), seen_text if attn.context_pre_only else attn.to_add_out(seen_text)


def spread_positions(transformer: SD3Transformer2DModel) -> None:
    """Let the tokens of small images be where the same things are in an image of SIDE_TOKENS, for training only.

    The model itself takes the middle positions for small images, so what it learns of their layout would be lost.
    """
    embedding, crop = transformer.pos_embed, transformer.pos_embed.cropped_pos_embed

    def spread(height: int, width: int) -> Tensor:
        factor = max(1, PATCH * SIDE_TOKENS // min(height, width))
        rows, columns = factor * height // PATCH, factor * width // PATCH
        positions = crop(factor * height, factor * width).unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
        return functional.avg_pool2d(positions, factor).flatten(2).transpose(1, 2)

    embedding.cropped_pos_embed = spread


def ready_for_training(networks: DitNetworks) -> None:
    """Use what only training needs: counted empty tokens and positions of small images. Weights do not change."""
    networks.transformer.set_attn_processor(CountedEmptyAttention())
    spread_positions(networks.transformer)
