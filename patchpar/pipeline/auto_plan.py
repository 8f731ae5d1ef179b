"""The rule that chooses a plan for plan="auto". The image is always that of plain diffusers.

1. Of all ways to distribute prompts, guidance branches and bands over the devices, the one whose busiest rank finishes
   first, by the formula in `plan.mesh_shape`: prompts send nothing, branches one prediction, bands all keys.
2. A UNet is split into bands of at least two units of rows; any other denoiser is split by tokens, with at least two
   rows of tokens for each device.
3. Prompts stay in one batch if a callback needs all of them, or if a part of them would give other images.
4. A device that would not make the call faster stays idle, and the reason is reported.
5. Where whole weights do not fit (see `auto_weights`), all devices work on one image, for which they hold the weights.
6. From 1.5 times the model's native size on both sides, models repeat objects: then there is advice how to ask for
   structure guidance. `upscale`, which is not a method of diffusers, uses it at these sizes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.models.info import PipelineInfo
from patchpar.pipeline.auto_weights import WeightChoice
from patchpar.plan.mesh_shape import Workload
from patchpar.plan.plan import Plan
from patchpar.strategies.data.known_pipelines import why_mixed, why_sampled
from patchpar.strategies.data.split import IMAGE_ARGUMENTS, split_call
from patchpar.strategies.structure.options import StructureGuidance
from patchpar.strategies.structure.sizing import MemoryEstimate, is_large, units_of

ADDRESSED = ("ip_adapter_masks", "gligen")  # in cross_attention_kwargs: positions in the whole image
WHOLE = WeightChoice()
UNITS_PER_BAND = 2  # with fewer, halos and waiting cost more than a further rank computes


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan and the reason for it. `advice`: another plan that the user may prefer for this size, or empty.

    `ranks`: those to take, in order; empty for the first ones.
    """

    plan: Plan
    reason: str
    advice: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def explanation(self) -> str:
        """The reason, with the advice."""
        return "; ".join(filter(None, (self.reason, self.advice)))


Rule = Callable[[PipelineInfo, int, Mapping[str, Any], WeightChoice], PlanChoice]


def choose(model: PipelineInfo, devices: int, kwargs: Mapping[str, Any], weights: WeightChoice = WHOLE) -> PlanChoice:
    """Return the plan for a call with `kwargs` on `devices` devices. Its image is that of plain diffusers.

    `weights`: where they are. Raises PlanError where they are on devices between which the call cannot be divided.
    """
    choice, large = _exact(model, devices, kwargs, weights), LargeImage.of(model, devices, kwargs)
    if large is None or large.why_not or weights.plan is not None:
        return choice
    return replace(
        choice,
        advice=f"{large.ratio}: at such sizes models repeat objects. plan={str(large.plan)!r} (--strategy structure) "
        "generates this image from patches of native size; it then differs from that of plain diffusers",
    )


def choose_for_upscale(
    model: PipelineInfo, devices: int, kwargs: Mapping[str, Any], weights: WeightChoice = WHOLE
) -> PlanChoice:
    """Return the plan that keeps a large image close to the one it starts from: structure guidance where possible.

    `weights`: see `choose`. Raises what `choose` raises.
    """
    large = LargeImage.of(model, devices, kwargs)
    if large is None or large.why_not or weights.plan is not None:
        choice = _exact(model, devices, kwargs, weights)
        reason = "" if large is None else large.why_not or "it takes whole weights"
        why_not = "" if large is None else f"; {large.ratio}, but no structure guidance: {reason}"
        return replace(choice, reason=choice.reason + why_not)
    unused = devices - large.plan.patch
    idle = f"; {unused} of {devices} devices idle: no more windows" if unused else ""
    return PlanChoice(large.plan, f"{large.ratio}: structure guidance{idle}; about {large.memory}")


@dataclass(frozen=True, slots=True)
class LargeImage:
    """An image so large that a model repeats objects. `why_not`: why structure guidance is impossible, or empty."""

    ratio: str
    plan: Plan
    memory: MemoryEstimate
    why_not: str

    @classmethod
    def of(cls, model: PipelineInfo, devices: int, kwargs: Mapping[str, Any]) -> "LargeImage | None":
        """Return the large image of a call; None if it is not large, or the pipeline not tested at such sizes."""
        size, native = model.size(kwargs), model.default_size
        if model.native_only_reason is None or size is None or native is None or not is_large(size, native):
            return None
        ratios = dict.fromkeys(f"{side / own:.3g}" for side, own in zip(size, native, strict=True))
        addressed = [name for name in kwargs.get("cross_attention_kwargs") or () if name in ADDRESSED]
        strategy, branches = StructureGuidance(), 2 if model.guided(kwargs) else 1
        units = units_of(size, native, model.size_unit, overlap=strategy.overlap, margin=strategy.margin)
        return cls(
            ratio=f"{' x '.join(ratios)} times the native {native[0]} x {native[1]}",
            plan=Plan(patch=min(devices, branches * max(units)), strategy=strategy),
            memory=MemoryEstimate.of(model, size, branches),
            why_not=f"{addressed[0]} has positions in the whole image" if addressed else model.native_only_reason,
        )


def _exact(model: PipelineInfo, devices: int, kwargs: Mapping[str, Any], weights: WeightChoice) -> PlanChoice:
    """Return the plan that generates the image of plain diffusers."""
    if weights.plan is not None:
        return _with_all_devices(model, devices, kwargs, weights)
    if devices == 1:
        return PlanChoice(Plan(), "one device: the plain pipeline")
    prompts = _prompts(kwargs)
    one_batch = _why_one_batch(model, kwargs) if prompts > 1 else ""
    work = _work(model, devices, kwargs, 1 if one_batch else prompts)
    plan, reasons = work.soonest(devices), []
    if plan.data > 1:
        reasons.append(f"{prompts} prompts over {plan.data} groups, which exchange nothing")
    elif one_batch:
        reasons.append(f"{prompts} prompts stay in one batch: {one_batch}")
    reasons += _reasons(model, work, plan, devices)
    if plan.world_size < devices:
        idle = f"{devices - plan.world_size} of {devices} devices idle"
        reasons.append(f"{idle}: {_why_no_more(model, work, plan)}")
    return PlanChoice(plan, "; ".join(reasons))


def _with_all_devices(
    model: PipelineInfo, devices: int, kwargs: Mapping[str, Any], weights: WeightChoice
) -> PlanChoice:
    """Return the plan of a call whose image all devices have to work on, since the weights are divided between them."""
    work = _work(model, devices, kwargs, 1)
    shapes = [plan for plan in work.shapes(devices) if plan.world_size == devices]
    if not shapes:
        most = max(plan.world_size for plan in work.shapes(devices))
        reason = model.unsplit_reason or (
            f"it has {work.branches} guidance branch{'es' * (work.branches > 1)} and an image of at most "
            f"{work.most_bands} part{'s' * (work.most_bands > 1)}"
        )
        raise PlanError(
            f"the weights are held by {devices} devices together ({weights.reason}), but the work of this call cannot "
            f"be divided between all of them: {reason}. Use devices={most}, or a larger image"
        )
    plan = work.first_of(shapes)
    reasons = _reasons(model, work, plan, devices) if devices > 1 else ["one device"]
    return PlanChoice(weights.applied_to(plan), "; ".join([*reasons, weights.reason]))


def _work(model: PipelineInfo, devices: int, kwargs: Mapping[str, Any], prompts: int) -> Workload:
    size = model.size(kwargs)
    return Workload(
        prompts=prompts,
        branches=model.branches(kwargs),
        most_bands=_most_bands(model, devices, size),
        units=_units(model, size) if model.splits_into_bands else None,
    )


def _reasons(model: PipelineInfo, work: Workload, plan: Plan, devices: int) -> list[str]:
    """Return why guidance and the image are divided as in `plan`."""
    reasons = []
    if plan.cfg > 1:
        part = {2: "half", 3: "third"}.get(plan.cfg, f"{plan.cfg}th")
        reasons.append(f"guidance is on: one branch for each {part} of the devices")
    elif work.branches > 1 and plan.patch > 1:
        reasons.append(f"guidance is not split, because {_why_whole(work.branches, devices)}")
    if plan.patch > 1:
        bands = plan.patch
        reasons.append(f"the image in {bands} bands" if model.splits_into_bands else f"tokens split in {bands}")
    return reasons


def without(model: PipelineInfo, plan: Plan, error: Exception) -> PipelineInfo | None:
    """Return the model without the ability that an automatic plan failed to use; None for other errors."""
    if isinstance(plan.strategy, StructureGuidance):
        return replace(model, native_only_reason=str(error))
    if plan.patch == 1 or not model.splits_into_tokens or not isinstance(error, (UnsupportedModel, VerificationError)):
        return None
    return replace(model, splits_into_tokens=False, unsplit_reason=str(error).partition(". What was found:")[0])


def _prompts(kwargs: Mapping[str, Any]) -> int:
    """Return how many prompts may be distributed over ranks; 1 with input images, which may belong to all prompts."""
    prompts = kwargs.get("prompt")
    alone = isinstance(prompts, list) and all(kwargs.get(name) is None for name in IMAGE_ARGUMENTS)
    return len(prompts) if isinstance(prompts, list) and alone else 1


def _why_one_batch(model: PipelineInfo, kwargs: Mapping[str, Any]) -> str:
    """Return why the prompts cannot be distributed over ranks; empty if they can."""
    if kwargs.get("callback_on_step_end") is not None:
        return "callback_on_step_end gets the latents of all prompts"
    try:
        split_call(kwargs, 0, _prompts(kwargs))
    except PlanError as error:
        return str(error)
    why = model.one_batch_reason or why_mixed(model.pipeline, model.methods, kwargs)
    return why or why_sampled(model.pipeline, model.networks, kwargs, model.parameters)


def _why_no_more(model: PipelineInfo, work: Workload, plan: Plan) -> str:
    if plan.patch < work.most_bands:
        return "no distribution over more devices is faster"
    if model.splits_into_bands:
        return "the image has no more bands"
    if model.splits_into_tokens:
        return "each device needs two rows of tokens"
    if not model.denoisers:
        return "a pipeline without a denoiser cannot be split"
    why = model.unsplit_reason or f"{', '.join(model.denoisers)} cannot be split"
    return why if work.branches > 1 else f"{why}, and there is no guidance to split"


def _why_whole(branches: int, devices: int) -> str:
    """Return why the guidance branches are not distributed over so many devices."""
    if branches == 2:
        return f"{devices} is odd, and with {devices - 1} devices each computes more"
    return f"{devices} devices cannot be divided by {branches} branches, and with fewer each computes more"


def _most_bands(model: PipelineInfo, devices: int, size: tuple[int, int] | None) -> int:
    if not (model.splits_into_bands or model.splits_into_tokens):
        return 1
    units = _units(model, size)
    return devices if units is None else max(1, min(devices, units // UNITS_PER_BAND))


def _units(model: PipelineInfo, size: tuple[int, int] | None) -> int | None:
    """Return the number of units of rows, or of rows of tokens, of the longer side; None if the size is unknown."""
    unit = model.vae_scale * model.total_stride if model.splits_into_bands else model.size_unit
    return None if size is None else max(size) // unit
