"""Callbacks that workers can import."""

from __future__ import annotations

from typing import Any

from diffusers.callbacks import PipelineCallback


class Darken(PipelineCallback):
    """Scales the latents after each step."""

    tensor_inputs = ("latents",)

    def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> Any:
        return {**callback_kwargs, "latents": callback_kwargs["latents"] * 0.8}
