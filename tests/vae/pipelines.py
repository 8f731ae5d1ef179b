"""A pipeline that looks at what it has decoded, as those of long videos do."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.pipelines.stable_diffusion_xl import StableDiffusionXLPipelineOutput


class GoesOn(StableDiffusionXLPipeline):
    """Draws, darkens the image, and draws on from there."""

    @torch.no_grad()
    def __call__(self, prompt: str, generator: Any = None, **kwargs: Any) -> Any:
        generated = super().__call__(prompt, generator=generator, output_type="pt", **kwargs).images
        latents = self.vae.encode(0.5 * generated).latent_dist.sample(generator)
        return StableDiffusionXLPipelineOutput(images=self.vae.decode(latents).sample)
