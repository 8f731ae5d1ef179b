"""Pipelines that draw pixels without a VAE, and the first latent diffusion."""

from __future__ import annotations

from tests.tiny import pixel_pipelines

from .entry import Entry

ENTRIES = (
    Entry(name="IFPipeline", build=pixel_pipelines.if_text),
    Entry(name="IFImg2ImgPipeline", build=pixel_pipelines.if_img2img),
    Entry(name="IFInpaintingPipeline", build=pixel_pipelines.if_inpaint),
    Entry(name="IFSuperResolutionPipeline", build=pixel_pipelines.if_upscale),
    Entry(name="IFImg2ImgSuperResolutionPipeline", build=pixel_pipelines.if_img2img_upscale),
    Entry(name="IFInpaintingSuperResolutionPipeline", build=pixel_pipelines.if_inpaint_upscale),
    Entry(name="LDMTextToImagePipeline", build=pixel_pipelines.ldm_text),
    Entry(name="LDMSuperResolutionPipeline", build=pixel_pipelines.ldm_upscale, guidance="none", prompts=""),
    Entry(name="ConsistencyModelPipeline", build=pixel_pipelines.consistency, guidance="none", prompts=""),
    Entry(name="DDPMPipeline", build=pixel_pipelines.ddpm, guidance="none", prompts=""),
    Entry(name="DDIMPipeline", build=pixel_pipelines.ddim, guidance="none", prompts=""),
)
