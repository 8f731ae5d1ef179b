"""Models that are distilled to few steps: how their configuration says so, and what they are called with.

A pipeline's class does not say it: the defaults of its call are those of the model that was distilled. What tells them
apart is in the files, mostly of the scheduler. The table has what is published; where two models have the same
configuration, such as Stable Diffusion 3.5 Large and its Turbo, nothing is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EULER = ("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")


@dataclass(frozen=True, slots=True, kw_only=True)
class FewSteps:
    """Arguments of a call. `max_sequence_length`: tokens of the prompt; None for the pipeline's own."""

    steps: int
    guidance: float
    max_sequence_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilledFamily:
    """A family of distilled models, of pipelines whose class begins with one of `pipelines`.

    `schedulers`: classes; empty for any. The others: values that the configurations of scheduler, denoiser and pipeline
    have; what is missing in one is None.
    """

    call: FewSteps
    pipelines: tuple[str, ...]
    schedulers: tuple[str, ...] = ()
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    denoiser: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=dict)

    def has(self, pipe: Any, denoiser: Mapping[str, Any]) -> bool:
        """Return whether a pipeline is of this family. `denoiser`: the configuration of its denoiser."""
        scheduler = getattr(pipe, "scheduler", None)
        if not type(pipe).__name__.startswith(self.pipelines):
            return False
        if self.schedulers and type(scheduler).__name__ not in self.schedulers:
            return False
        found = (getattr(scheduler, "config", None) or {}, denoiser, getattr(pipe, "config", None) or {})
        wanted = (self.scheduler, self.denoiser, self.pipeline)
        return all(_agree(*each) for each in zip(found, wanted, strict=True))


FAMILIES = (
    # sd-turbo and sdxl-turbo (adversarial distillation, arXiv:2311.17042): 1 to 4 steps at timesteps counted from the
    # end. Models with zero terminal SNR (arXiv:2305.08891) count from there too, but predict v and rescale their betas.
    DistilledFamily(
        call=FewSteps(steps=4, guidance=0.0),
        pipelines=("StableDiffusion",),
        schedulers=EULER,
        scheduler={"timestep_spacing": "trailing", "prediction_type": "epsilon", "rescale_betas_zero_snr": False},
    ),
    # Consistency models without guidance embedded (LCM-LoRA, arXiv:2311.05556; TCD, arXiv:2402.19159).
    DistilledFamily(
        call=FewSteps(steps=4, guidance=0.0),
        pipelines=("StableDiffusion",),
        schedulers=("LCMScheduler", "TCDScheduler"),
        denoiser={"time_cond_proj_dim": None},
    ),
    # FLUX.1-schnell (Black Forest Labs, 2024): no guidance embedded, no shift by size, prompts of 256 tokens.
    DistilledFamily(
        call=FewSteps(steps=4, guidance=0.0, max_sequence_length=256),
        pipelines=("FluxPipeline", "FluxImg2Img", "FluxInpaint", "FluxControl"),
        schedulers=("FlowMatchEulerDiscreteScheduler",),
        scheduler={"use_dynamic_shifting": False},
        denoiser={"guidance_embeds": False},
    ),
    # FLUX.2 [klein] and Krea 2 Turbo say it themselves.
    DistilledFamily(call=FewSteps(steps=4, guidance=1.0), pipelines=("Flux2Klein",), pipeline={"is_distilled": True}),
    DistilledFamily(call=FewSteps(steps=8, guidance=0.0), pipelines=("Krea2",), pipeline={"is_distilled": True}),
)


def few_steps_of(pipe: Any, denoiser: Mapping[str, Any]) -> FewSteps | None:
    """Return what a distilled pipeline is called with, by FAMILIES; None for others.

    `denoiser`: the configuration of its denoiser.
    """
    return next((family.call for family in FAMILIES if family.has(pipe, denoiser)), None)


def _agree(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(found.get(name) == value for name, value in wanted.items())
