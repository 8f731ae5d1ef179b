"""The autoencoder of the embedded model: 4x per side, anchored latents, attention in the middle."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from training.latents import to_latent, to_tensor
from training.render import sample_render

VAE_CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (16, 32, 64),
    "layers_per_block": 1,
    "latent_channels": 4,
    "force_upcast": False,  # its activations are small; and diffusers upcasts none without post_quant_conv
    "norm_num_groups": 8,
    "sample_size": 256,
    "mid_block_add_attention": True,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 1.0,
}


def new_vae(start: Path | None = None) -> AutoencoderKL:
    """A fresh autoencoder, or one with the weights of a saved one where the names and shapes agree.

    The middle attention starts with a zero output projection: at first it changes nothing.
    """
    vae = AutoencoderKL(**VAE_CONFIG)
    for half in (vae.encoder, vae.decoder):
        for attention in half.mid_block.attentions:
            nn.init.zeros_(attention.to_out[0].weight)
            nn.init.zeros_(attention.to_out[0].bias)
    if start is not None:
        given = AutoencoderKL.from_pretrained(start, variant="fp16", torch_dtype=torch.float32).state_dict()
        own = vae.state_dict()
        vae.load_state_dict({**own, **{name: value for name, value in given.items() if name in own}})
    return vae


@torch.no_grad()
def reconstruction(vae: AutoencoderKL, count: int, *, side: int = 256) -> dict[str, float]:
    """How well held-out renders come back: decoder alone and encoder with decoder, in dB, and the encoder's error."""
    decoded, cycled, error = [], [], []
    for seed in range(count):
        original = to_tensor(sample_render(f"vae {seed}", height=side, width=side, held_out=True).pixels)
        latent, guess = to_latent(original), vae.encode(original).latent_dist.mode()
        decoded.append(psnr(vae.decode(latent).sample, original))
        cycled.append(psnr(vae.decode(guess).sample, original))
        error.append(((guess - latent) ** 2).mean().item())
    mean = [sum(values) / count for values in (decoded, cycled, error)]
    return dict(zip(("decoder_db", "autoencoder_db", "latent_error"), mean, strict=True))


def psnr(image_BCHW: Tensor, reference_BCHW: Tensor) -> float:
    """Peak signal to noise ratio in dB of images in -1..1."""
    error = ((image_BCHW.clamp(-1, 1) - reference_BCHW) ** 2).mean().clamp_min(1e-12)
    return (10 * torch.log10(4 / error)).item()
