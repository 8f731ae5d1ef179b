"""Models that are distilled to few steps: how their configuration says so, and what they are called with.

A pipeline's class does not say it: the defaults of its call are those of the model that was distilled. What tells them
apart is in the files, mostly of the scheduler. Some have the configuration of the model that was distilled, such as
Stable Diffusion 3.5 Large Turbo: there a word in the name of the repository or folder tells. The table has what is
published. Names with "hyper" or "lcm" are no sign: Hyper-SD (arXiv:2404.13686) is published with guidance and without,
and consistency models have a scheduler of their own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

CACHED = "models--"  # folders of the hub's cache: models--owner--name/snapshots/revision
UNDONE = ("de", "un", "non", "no", "not")  # before such a word: the distillation was undone
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
    have; what is missing in one is None. `named`: a word in the name of its repository or folder, "" for any name.
    """

    call: FewSteps
    pipelines: tuple[str, ...]
    schedulers: tuple[str, ...] = ()
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    denoiser: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    named: str = ""

    def has(self, pipe: Any, denoiser: Mapping[str, Any]) -> bool:
        """Return whether a pipeline is of this family. `denoiser`: the configuration of its denoiser."""
        scheduler = getattr(pipe, "scheduler", None)
        if self.named and self.named not in words_of(path_of(pipe)):
            return False
        if not type(pipe).__name__.startswith(self.pipelines):
            return False
        if self.schedulers and type(scheduler).__name__ not in self.schedulers:
            return False
        found = (getattr(scheduler, "config", None) or {}, denoiser, getattr(pipe, "config", None) or {})
        wanted = (self.scheduler, self.denoiser, self.pipeline)
        return all(_agree(*each) for each in zip(found, wanted, strict=True))


FAMILIES = (
    # Stable Diffusion 3.5 Large Turbo (Stability AI, 2024).
    DistilledFamily(call=FewSteps(steps=4, guidance=0.0), pipelines=("StableDiffusion3",), named="turbo"),
    # Z-Image-Turbo (Tongyi-MAI, 2025), as in diffusers' example.
    DistilledFamily(call=FewSteps(steps=8, guidance=0.0), pipelines=("ZImage",), named="turbo"),
    # SDXL-Lightning (arXiv:2402.13929), whose files are for 2, 4 or 8 steps: 4 unless the name says another number.
    DistilledFamily(call=FewSteps(steps=4, guidance=0.0), pipelines=("StableDiffusionXL",), named="lightning"),
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
    # The same with another scheduler in its files.
    DistilledFamily(
        call=FewSteps(steps=4, guidance=0.0, max_sequence_length=256),
        pipelines=("FluxPipeline", "FluxImg2Img", "FluxInpaint", "FluxControl"),
        denoiser={"guidance_embeds": False},
        named="schnell",
    ),
    # FLUX.2 [klein] and Krea 2 Turbo say it themselves.
    DistilledFamily(call=FewSteps(steps=4, guidance=1.0), pipelines=("Flux2Klein",), pipeline={"is_distilled": True}),
    DistilledFamily(call=FewSteps(steps=8, guidance=0.0), pipelines=("Krea2",), pipeline={"is_distilled": True}),
)


def few_steps_of(pipe: Any, denoiser: Mapping[str, Any]) -> FewSteps | None:
    """Return what a distilled pipeline is called with, by FAMILIES; None for others.

    `denoiser`: the configuration of its denoiser.
    """
    family = next((each for each in FAMILIES if each.has(pipe, denoiser)), None)
    if family is None or not family.named:
        return None if family is None else family.call
    steps = re.search(r"(?<![\d.])([1-9]\d?)[-_ ]?steps?(?![a-z])", _last(path_of(pipe)))
    return replace(family.call, steps=int(steps[1])) if steps else family.call


def words_of(path: str) -> frozenset[str]:
    """Return the words in the name of a repository or folder, without those before which "de" or "un" stands."""
    found = re.findall(r"[a-z]+|[0-9]+", _last(path))
    return frozenset(word for before, word in zip(["", *found], found, strict=False) if before not in UNDONE)


def path_of(pipe: Any) -> str:
    """Return the name or folder that diffusers has loaded a pipeline from; "" if unknown."""
    return str((getattr(pipe, "config", None) or {}).get("_name_or_path") or "")


def _last(path: str) -> str:
    """Return the name of the repository, also in the hub's cache, or of the folder, in lower case."""
    parts = [part for part in re.split(r"[/\\]", path.lower()) if part]
    cached = [part.removeprefix(CACHED).split("--")[-1] for part in parts if part.startswith(CACHED)]
    return (cached or parts or [""])[-1]


def _agree(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(found.get(name) == value for name, value in wanted.items())
