"""The networks of the embedded model: an SDXL-class UNet, two small CLIP text encoders, a scheduler."""

from __future__ import annotations

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from training.latents import CELL
from training.tokenizer import build_tokenizer

TEXT_WIDTH, POOLED_WIDTH, TIME_ID_WIDTH = 64, 128, 32

UNET_CONFIG = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (48, 96, 128),
    "layers_per_block": 1,
    "norm_num_groups": 16,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (2, 3, 4),
    "cross_attention_dim": TEXT_WIDTH + POOLED_WIDTH,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": TIME_ID_WIDTH,
    "projection_class_embeddings_input_dim": 6 * TIME_ID_WIDTH + POOLED_WIDTH,
}


def text_config(width: int) -> CLIPTextConfig:
    """The configuration of a text encoder of that width."""
    tokenizer = build_tokenizer()
    return CLIPTextConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        vocab_size=len(tokenizer),
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        hidden_act="quick_gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def noise_scheduler() -> DDIMScheduler:
    """Noise levels of training and the scheduler of the packaged pipeline: v-prediction, terminal SNR above zero."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        set_alpha_to_one=False,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
    )


class Networks(nn.Module):
    """The three networks that are trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(**UNET_CONFIG)
        self.text_encoder = CLIPTextModel(text_config(TEXT_WIDTH))
        self.text_encoder_2 = CLIPTextModelWithProjection(text_config(POOLED_WIDTH))

    def encode(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (B, T) to hidden states (B, T, 192) and pooled embedding (B, 128), as the pipeline reads them."""
        first = self.text_encoder(ids_BT, output_hidden_states=True)
        second = self.text_encoder_2(ids_BT, output_hidden_states=True)
        return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1), second[0]

    def forward(self, noisy_BCHW: Tensor, timestep_B: Tensor, ids_BT: Tensor) -> Tensor:
        """The v-prediction (B, 4, H, W) for noisy latents, timesteps 0..999 and captions as token ids."""
        hidden, pooled = self.encode(ids_BT)
        extra = {"text_embeds": pooled, "time_ids": time_ids(noisy_BCHW)}
        return self.unet(noisy_BCHW, timestep_B, hidden, added_cond_kwargs=extra, return_dict=False)[0]


def time_ids(latent_BCHW: Tensor) -> Tensor:
    """SDXL's size conditioning (B, 6) in pixels: original size, crop corner, target size, for an uncropped image."""
    batch, _, height, width = latent_BCHW.shape
    size = [CELL * height, CELL * width]
    return torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=latent_BCHW.device).repeat(batch, 1)
