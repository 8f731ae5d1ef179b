"""Callbacks that workers can import."""

from __future__ import annotations

from typing import Any

from diffusers.callbacks import PipelineCallback
from diffusers.models.attention_processor import AttnProcessor2_0

from patchpar.shard.torch_switches import caller_switches


class Darken(PipelineCallback):
    """Scales the latents after each step."""

    tensor_inputs = ("latents",)

    def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> Any:
        return {**callback_kwargs, "latents": callback_kwargs["latents"] * 0.8}


class NotesSwitches(PipelineCallback):
    """Notes the switches of torch in the process of a rank, as an attribute of its pipeline."""

    tensor_inputs = ("latents",)

    def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> Any:
        pipeline.noted_switches = dict(caller_switches() or {})
        return callback_kwargs


class Halved:
    """An attention processor that gives half of what the default one does."""

    def __init__(self) -> None:
        self.inner = AttnProcessor2_0()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * self.inner(*args, **kwargs)
