"""Pipelines of FLUX.1, Chroma and Stable Diffusion 3: transformers with text in front of the image tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers

from tests.tiny import autoencoders, language_encoders, sample_images, transformer_pipelines
from tests.tiny.image_pipelines import PROMPT, SIZE

from .entry import CONTROL, IMAGE, MASKED, THREE, Built, Entry, Guidance, builder, changed, derived

_PAG = {"pag_scale": 2.0}
_FILL = MASKED | {"mask_image": sample_images.mask().rotate(180)}
"""With the usual mask, what is left of the image is darkest next to it, and the norms of this small autoencoder make
some 1e-5 of what rounding leaves when bands of it are encoded; in float64 they are 6e-15 apart."""


def _flux(name: str, call: dict[str, Any], *, channels: int = 16, out: int | None = None) -> Callable[[], Built]:
    """Of FLUX's components; `channels` in, `out` of them as prediction."""

    def build() -> Built:
        transformer = changed(transformer_pipelines.flux()[0].transformer, in_channels=channels, out_channels=out)
        return derived(transformer_pipelines.flux, name, call, transformer=transformer)

    return build


def _flux_controlnet(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    def build() -> Built:
        source = transformer_pipelines.flux()[0].transformer.config
        taken = (
            *("patch_size", "in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim"),
            *("pooled_projection_dim", "axes_dims_rope", "guidance_embeds"),
        )
        controlnet = diffusers.FluxControlNetModel(
            **{option: source[option] for option in taken}, num_layers=1, num_single_layers=1
        )
        return derived(transformer_pipelines.flux, name, CONTROL | call, controlnet=controlnet)

    return build


def _kontext(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    return _flux(name, call | {"max_area": 128 * 128, "_auto_resize": False, **SIZE})


def _sd3_controlnet(name: str, call: dict[str, Any], extra_channels: int = 0) -> Callable[[], Built]:
    def build() -> Built:
        source = transformer_pipelines.sd3()[0].transformer
        controlnet = diffusers.SD3ControlNetModel.from_transformer(
            source, num_layers=1, num_extra_conditioning_channels=extra_channels, load_weights_from_transformer=False
        )
        return derived(transformer_pipelines.sd3, name, CONTROL | call, controlnet=controlnet)

    return build


def _sd3_inpaint() -> Built:
    """It takes 16 channels or 33."""
    parts = {
        "vae": autoencoders.kl(latent_channels=16, quant_conv=False, scaling_factor=1.53),
        "transformer": changed(transformer_pipelines.sd3()[0].transformer, in_channels=16, out_channels=16),
    }
    return derived(transformer_pipelines.sd3, "StableDiffusion3InpaintPipeline", MASKED, **parts)


def _cloze(name: str, call: dict[str, Any]) -> Callable[[], Built]:
    """One example of what to do, and an image to do it to: rows of a grid, of which the last place is empty.

    The stage that enlarges the result encodes an image that is all masked, hence of one colour: the norms of the
    autoencoder make 1e-3 of what rounding leaves when it is encoded in bands, so that only the first stage is tried.
    """

    def build() -> Built:
        transformer = changed(
            transformer_pipelines.flux()[0].transformer, in_channels=4 * (4 + 4 + 64), out_channels=16
        )
        grid = [[sample_images.scene(), sample_images.scene()], [sample_images.scene(), None]]
        prompts = {"task_prompt": "edges of the picture", "content_prompt": PROMPT, "image": grid}
        parts = {"transformer": transformer, "resolution": 128}
        return derived(transformer_pipelines.flux, name, prompts | call, **parts)

    return build


def _redux() -> Built:
    """It has no denoiser: what it makes of images is the text of another pipeline."""
    from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder

    source = transformer_pipelines.flux()[0]
    parts = {name: source.components[name] for name in ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")}
    pipe = diffusers.FluxPriorReduxPipeline(
        image_encoder=language_encoders.siglip(),
        feature_extractor=language_encoders.siglip_processor(),
        image_embedder=ReduxImageEncoder(redux_dim=32, txt_in_features=32),
        **parts,
    )
    return pipe, {"image": sample_images.scene(), "prompt": PROMPT, "generator": None}


def _chroma_inpaint() -> Built:
    """It asks its transformer for a setting that a configuration may have beside those of the class."""
    transformer = transformer_pipelines.chroma()[0].transformer
    transformer.register_to_config(guidance_embeds=False)
    return derived(transformer_pipelines.chroma, "ChromaInpaintPipeline", MASKED, transformer=transformer)


_FLUX: dict[str, tuple[Callable[[], Built], Guidance]] = {
    "FluxPipeline": (transformer_pipelines.flux, "a call each"),
    "FluxImg2ImgPipeline": (_flux("FluxImg2ImgPipeline", IMAGE), "a call each"),
    "FluxInpaintPipeline": (_flux("FluxInpaintPipeline", MASKED), "a call each"),
    "FluxControlPipeline": (_flux("FluxControlPipeline", CONTROL, channels=32, out=16), "none"),
    "FluxControlImg2ImgPipeline": (
        _flux("FluxControlImg2ImgPipeline", IMAGE | CONTROL, channels=32, out=16),
        "none",
    ),
    "FluxControlInpaintPipeline": (
        _flux("FluxControlInpaintPipeline", MASKED | CONTROL, channels=32, out=16),
        "none",
    ),
    "FluxFillPipeline": (_flux("FluxFillPipeline", _FILL, channels=4 * (4 + 4 + 64), out=16), "none"),
    "FluxControlNetPipeline": (_flux_controlnet("FluxControlNetPipeline", {}), "a call each"),
    "FluxControlNetImg2ImgPipeline": (_flux_controlnet("FluxControlNetImg2ImgPipeline", IMAGE), "none"),
    "FluxControlNetInpaintPipeline": (_flux_controlnet("FluxControlNetInpaintPipeline", MASKED), "none"),
    "FluxKontextPipeline": (_kontext("FluxKontextPipeline", {"image": sample_images.scene()}), "a call each"),
    "FluxKontextInpaintPipeline": (_kontext("FluxKontextInpaintPipeline", MASKED), "a call each"),
    "ChromaPipeline": (transformer_pipelines.chroma, "a call each"),
    "ChromaImg2ImgPipeline": (builder(transformer_pipelines.chroma, "ChromaImg2ImgPipeline", IMAGE), "a call each"),
    "FluxPriorReduxPipeline": (_redux, "none"),
    "ChromaInpaintPipeline": (_chroma_inpaint, "a call each"),
    "VisualClozeGenerationPipeline": (_cloze("VisualClozeGenerationPipeline", {}), "none"),
    "VisualClozePipeline": (
        _cloze("VisualClozePipeline", {"upsampling_strength": 0.0, "output_type": "np"}),
        "none",
    ),
    "AuraFlowPipeline": (transformer_pipelines.auraflow, "one call"),
    "DiTPipeline": (transformer_pipelines.dit, "one call"),
    "PixArtSigmaPipeline": (transformer_pipelines.pixart, "one call"),
    "PixArtAlphaPipeline": (builder(transformer_pipelines.pixart, "PixArtAlphaPipeline", {}), "one call"),
    "PixArtSigmaPAGPipeline": (builder(transformer_pipelines.pixart, "PixArtSigmaPAGPipeline", _PAG), THREE),
    "StableDiffusion3Pipeline": (transformer_pipelines.sd3, "one call"),
    "StableDiffusion3Img2ImgPipeline": (
        builder(transformer_pipelines.sd3, "StableDiffusion3Img2ImgPipeline", IMAGE),
        "one call",
    ),
    "StableDiffusion3InpaintPipeline": (
        _sd3_inpaint,
        "one call",
    ),
    "StableDiffusion3ControlNetPipeline": (_sd3_controlnet("StableDiffusion3ControlNetPipeline", {}), "one call"),
    "StableDiffusion3ControlNetInpaintingPipeline": (
        _sd3_controlnet("StableDiffusion3ControlNetInpaintingPipeline", {"control_mask": sample_images.mask()}, 1),
        "one call",
    ),
    "StableDiffusion3PAGPipeline": (
        builder(transformer_pipelines.sd3, "StableDiffusion3PAGPipeline", _PAG),
        THREE,
    ),
    "StableDiffusion3PAGImg2ImgPipeline": (
        builder(transformer_pipelines.sd3, "StableDiffusion3PAGImg2ImgPipeline", _PAG | IMAGE),
        THREE,
    ),
}

_ONE_PROMPT = ("DiTPipeline", "FluxPriorReduxPipeline", "VisualClozeGenerationPipeline", "VisualClozePipeline")
"""Classes instead of prompts, a sum over all prompts, or a grid of images for each."""

ENTRIES = tuple(
    Entry(
        name=name,
        build=build,
        guidance=guidance,
        prompts="" if name in _ONE_PROMPT else "prompt",
        output_type="np" if name == "DiTPipeline" else "latent",
    )
    for name, (build, guidance) in _FLUX.items()
)
