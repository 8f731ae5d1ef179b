"""Tiny random-weight diffusers pipelines, complete and offline, one builder per kind.

`build("sdxl")` gives a pipeline in eval mode (CPU, fp32, seeded: the same weights in every process) and the arguments
of a short call. `latents(tiny, steps=3)` runs it and returns the final latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers

from . import (
    adapted_pipelines,
    conditioned_pipelines,
    control_pipelines,
    image_pipelines,
    kandinsky_pipelines,
    language_pipelines,
    pixel_pipelines,
    transformer_pipelines,
    video_pipelines,
    video_transformer_pipelines,
)
from .copies import Copies
from .weights import enliven, seeded

diffusers.logging.set_verbosity_error()
transformers.logging.set_verbosity_error()

Builder = Callable[[], tuple[Any, dict[str, Any]]]

BATCHED: dict[str, Builder] = {
    "sd": image_pipelines.sd,
    "sd_img2img": image_pipelines.sd_img2img,
    "sd_inpaint": image_pipelines.sd_inpaint,
    "sd_controlnet": image_pipelines.sd_controlnet,
    "sdxl": image_pipelines.sdxl,
    "sdxl_img2img": image_pipelines.sdxl_img2img,
    "sdxl_inpaint": image_pipelines.sdxl_inpaint,
    "sdxl_controlnet": image_pipelines.sdxl_controlnet,
    "instruct_pix2pix": image_pipelines.instruct_pix2pix,
    "svd": video_pipelines.svd,
    "animatediff": video_pipelines.animatediff,
    "text_to_video": video_pipelines.text_to_video,
    "dit": transformer_pipelines.dit,
    "pixart": transformer_pipelines.pixart,
    "sd3": transformer_pipelines.sd3,
    "auraflow": transformer_pipelines.auraflow,
    "hidream": language_pipelines.hidream,
    "zimage": language_pipelines.zimage,
    "cogvideox": video_transformer_pipelines.cogvideox,
    "ltx": video_transformer_pipelines.ltx,
}
"""Pipelines that run all branches of guidance in one denoiser call."""

SEQUENTIAL: dict[str, Builder] = {
    "flux": transformer_pipelines.flux,
    "chroma": transformer_pipelines.chroma,
    "qwen": language_pipelines.qwen,
    "qwen_edit": language_pipelines.qwen_edit,
    "lumina2": language_pipelines.lumina2,
    "cogview4": language_pipelines.cogview4,
    "wan": video_transformer_pipelines.wan,
    "wan_two": video_transformer_pipelines.wan_two,
    "wan_i2v": video_transformer_pipelines.wan_i2v,
    "wan_i2v_two": video_transformer_pipelines.wan_i2v_two,
    "hunyuan_video": video_transformer_pipelines.hunyuan_video,
}
"""Pipelines that call the denoiser once for each branch of guidance."""

DISTILLED: dict[str, Builder] = {
    "flux2": language_pipelines.flux2,
    "flux_controlnet_img2img": control_pipelines.flux_controlnet_img2img,
}
"""Pipelines without branches: the guidance scale is an input of the denoiser."""

AMBIGUOUS: dict[str, Builder] = {
    "cogvideox_image": video_transformer_pipelines.cogvideox_image,
    "allegro": video_transformer_pipelines.allegro,
}
"""Batched as well, but shapes alone do not tell which arguments of the denoiser carry the batch."""

OWN_TIMES: dict[str, Builder] = {
    "wan_ti2v": conditioned_pipelines.wan_ti2v,
    "wan_ti2v_image": conditioned_pipelines.wan_ti2v_image,
    "skyreels_forcing": conditioned_pipelines.skyreels_forcing,
    "ltx_image": conditioned_pipelines.ltx_image,
    "ltx_condition": conditioned_pipelines.ltx_condition,
    "ltx2": conditioned_pipelines.ltx2,
    "ltx2_image": conditioned_pipelines.ltx2_image,
    "ltx2_condition": conditioned_pipelines.ltx2_condition,
}
"""Pipelines in which tokens, frames or sound have a time or a scheduler of their own."""

BUILDERS = BATCHED | SEQUENTIAL | DISTILLED | OWN_TIMES | AMBIGUOUS

RARER: dict[str, Builder] = {
    "sd_t2i": adapted_pipelines.sd_t2i,
    "sd_t2i_multi": adapted_pipelines.sd_t2i_multi,
    "sdxl_t2i": adapted_pipelines.sdxl_t2i,
    "sdxl_t2i_multi": adapted_pipelines.sdxl_t2i_multi,
    "sd_inpaint_4": adapted_pipelines.sd_inpaint_4,
    "sd_controlnet_xs": adapted_pipelines.sd_controlnet_xs,
    "sdxl_controlnet_xs": adapted_pipelines.sdxl_controlnet_xs,
    "sd_ip_masks": adapted_pipelines.sd_ip_masks,
    "sdxl_ip_masks": adapted_pipelines.sdxl_ip_masks,
    "if_text": pixel_pipelines.if_text,
    "if_img2img": pixel_pipelines.if_img2img,
    "if_inpaint": pixel_pipelines.if_inpaint,
    "if_upscale": pixel_pipelines.if_upscale,
    "if_img2img_upscale": pixel_pipelines.if_img2img_upscale,
    "if_inpaint_upscale": pixel_pipelines.if_inpaint_upscale,
    "ddpm": pixel_pipelines.ddpm,
    "ddim": pixel_pipelines.ddim,
    "consistency": pixel_pipelines.consistency,
    "ldm_upscale": pixel_pipelines.ldm_upscale,
    "ldm_text": pixel_pipelines.ldm_text,
    "kandinsky22": kandinsky_pipelines.kandinsky22,
    "kandinsky22_combined": kandinsky_pipelines.kandinsky22_combined,
    "kandinsky22_img2img": kandinsky_pipelines.kandinsky22_img2img,
    "kandinsky22_inpaint": kandinsky_pipelines.kandinsky22_inpaint,
    "kandinsky22_controlnet": kandinsky_pipelines.kandinsky22_controlnet,
    "kandinsky3": kandinsky_pipelines.kandinsky3,
    "kandinsky3_img2img": kandinsky_pipelines.kandinsky3_img2img,
}
"""Pipelines around UNets that are tried in bands only."""

TRANSFORMERS_PIPED: dict[str, Builder] = {
    name: builder
    for name, builder in BUILDERS.items()
    if builder.__module__ not in (image_pipelines.__name__, video_pipelines.__name__)
}
"""Those whose denoiser is a transformer."""

UNETS = tuple(name for name in BUILDERS if name not in TRANSFORMERS_PIPED)
"""Those whose denoiser is a UNet."""

COPIES = Copies()
"""Of the pipelines that this process has built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A tiny pipeline and the arguments of a short call with guidance on."""

    name: str
    pipe: Any
    call_kwargs: dict[str, Any]

    @property
    def denoiser(self) -> torch.nn.Module:
        return self.pipe.unet if hasattr(self.pipe, "unet") else self.pipe.transformer


def build(name: str) -> Tiny:
    """A fresh pipeline with the same weights every time. The caller's random state is left as it was."""
    builders = BUILDERS | RARER
    if name not in builders:
        raise KeyError(f"no tiny pipeline {name!r}: there are {', '.join(sorted(builders))}")
    pipe, call_kwargs = COPIES.of(name, lambda: _built(builders[name]))
    return Tiny(name=name, pipe=pipe, call_kwargs=call_kwargs)


def _built(builder: Builder) -> tuple[Any, dict[str, Any]]:
    with seeded():
        pipe, call_kwargs = builder()
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                enliven(component.eval().requires_grad_(False))
    pipe.set_progress_bar_config(disable=True)
    return pipe, call_kwargs


def latents(tiny: Tiny, *, seed: int = 0, steps: int = 3, **overrides: Any) -> torch.Tensor:
    """Run the pipeline from a seeded generator of its own and return the final latents (of DiT, the images).

    Safe to call on every rank at once: nothing depends on the process's random state.
    """
    arguments = tiny.call_kwargs | {"num_inference_steps": steps, "output_type": "latent"} | overrides
    arguments.setdefault("generator", torch.Generator().manual_seed(seed))
    output = tiny.pipe(**arguments)
    return torch.as_tensor(output.images if hasattr(output, "images") else output.frames)
