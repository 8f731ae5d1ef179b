"""Pipelines of Z-Image with a ControlNet that borrows layers of the transformer, and with images to refer to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch

from tests.tiny import language_encoders, language_pipelines, sample_images

from .entry import CONTROL, MASKED, Built, Entry, changed, configuration, derived


def _controlnet(name: str, call: dict[str, Any], channels: int) -> Callable[[], Built]:
    def build() -> Built:
        config = language_pipelines.zimage()[0].transformer.config
        taken = ("dim", "n_refiner_layers", "n_heads", "n_kv_heads", "all_patch_size", "all_f_patch_size")
        controlnet = diffusers.ZImageControlNetModel(
            control_layers_places=[0, 1],
            control_refiner_layers_places=[0],
            control_in_dim=channels,
            add_control_noise_refiner="control_noise_refiner",
            **{option: config[option] for option in taken},
        )
        return derived(language_pipelines.zimage, name, CONTROL | call, controlnet=controlnet)

    return build


class _Encoder(diffusers.AutoencoderKL):  # type: ignore[misc]  # diffusers is not typed
    """Takes images in any precision: the pipeline has those that it refers to in bfloat16."""

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        return super().encode(x.to(self.dtype), return_dict)


def _omni() -> Built:
    """Two images to refer to."""
    source = language_pipelines.zimage()[0]
    parts = {
        "transformer": changed(source.transformer, siglip_feat_dim=32),
        "vae": _Encoder(**configuration(source.vae)),
        "siglip": language_encoders.siglip2(),
        "siglip_processor": language_encoders.siglip2_processor(),
    }
    call = {"image": [sample_images.scene(), sample_images.scene(96, 128)]}
    return derived(language_pipelines.zimage, "ZImageOmniPipeline", call, **parts)


ENTRIES = (
    Entry(
        name="ZImageControlNetPipeline",
        build=_controlnet("ZImageControlNetPipeline", {}, 16),
    ),
    Entry(
        name="ZImageControlNetInpaintPipeline",
        build=_controlnet("ZImageControlNetInpaintPipeline", MASKED, 33),
    ),
    Entry(name="ZImageOmniPipeline", build=_omni),
)
