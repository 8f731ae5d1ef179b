"""IP-Adapters for the tiny transformers of FLUX and SD3: weights as the loaders of diffusers want them, and images.

What the encoder would say of an image is given instead of it.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, IPAdapterTimeImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import Tensor, nn

from tests import tiny

SEEN = 16
"""How wide an image is as it is given."""
Weights = dict[str, dict[str, Tensor]]


def weights(name: str) -> Weights:
    """An adapter for the tiny pipeline of that name; the same every time."""
    model: Any = tiny.build(name).denoiser
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return _for_flux(model) if name == "flux" else _for_sd3(model)


def images(name: str) -> dict[str, Any]:
    """Arguments of the pipeline that stand for an image, and for none."""
    generator = torch.Generator().manual_seed(8)
    seen, nothing = (torch.randn(1, 1 if name == "flux" else 3, SEEN, generator=generator) for _ in range(2))
    if name == "flux":
        return {"ip_adapter_image_embeds": [seen], "negative_ip_adapter_image_embeds": [nothing]}
    return {"ip_adapter_image_embeds": torch.cat([nothing, seen])}


def _for_flux(model: Any) -> Weights:
    width = model.config.joint_attention_dim
    projection = ImageProjection(image_embed_dim=SEEN, cross_attention_dim=width, num_image_text_embeds=4)
    layers = {
        f"{number}.{name.replace('_ip.0', '_ip')}": x
        for number in range(model.config.num_layers)
        for name, x in _lively(FluxIPAdapterAttnProcessor(model.inner_dim, width)).items()
    }
    return {
        "image_proj": {name.replace("image_embeds", "proj"): x for name, x in _lively(projection).items()},
        "ip_adapter": layers,
    }


def _for_sd3(model: Any) -> Weights:
    width, head = model.inner_dim, model.config.attention_head_dim
    projection = IPAdapterTimeImageProjection(
        embed_dim=SEEN, output_dim=width, hidden_dim=64, heads=1, num_queries=4, timestep_in_dim=32
    )
    layers = {
        f"{number}.{name}": x
        for number in range(len(model.attn_processors))
        for name, x in _lively(SD3IPAdapterJointAttnProcessor2_0(width, width, head, timesteps_emb_dim=64)).items()
    }
    return {"image_proj": _lively(projection), "ip_adapter": layers}


def _lively(module: nn.Module) -> dict[str, Tensor]:
    """Its weights, large enough to matter."""
    return {name: 2 * x.detach() for name, x in module.state_dict().items()}
