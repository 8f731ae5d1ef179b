"""Refuse an impossible call before any worker computes. Errors have the value, the limit and the way out."""

import difflib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.launch.accelerators import kind_of
from patchpar.launch.host_memory import free_memory
from patchpar.models.caption_words import unknown_words
from patchpar.models.info import DENOISERS, NAMED_FOR_GUIDANCE, PipelineInfo, refuse_compiled_denoisers, refuse_parallel
from patchpar.models.size_grid import check_side
from patchpar.models.split_facts import SplitFacts
from patchpar.models.task import ANY_PROMPT
from patchpar.pipeline.step_callbacks import OLD_NAMES, ON_STEP_END
from patchpar.plan.plan import Plan
from patchpar.plan.scalars import is_whole, plain
from patchpar.shard.generators import SAMPLE_ON_CPU, check_generator, generators_of
from patchpar.strategies.data.split import PromptSlice
from patchpar.strategies.piped import PipedStages
from patchpar.strategies.structure.options import StructureGuidance
from patchpar.strategies.structure.sizing import check_room, refusal_of, units_of

log = logging.getLogger(__name__)

COUNTS = ("num_inference_steps", "num_images_per_prompt", "num_videos_per_prompt", "num_frames")
SIDES = ("height", "width")
PROMPTS = ("prompt", "prompt_2", "prompt_3", "negative_prompt", "negative_prompt_2", "negative_prompt_3")
FREE_NOISE = "enable_free_noise"
"""The method of pipelines whose prompts may be a dict, of texts by number of the frame (arXiv:2310.15169)."""


def bind(model: PipelineInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, numbers as Python's own. Raises TypeError like a call with wrong arguments."""
    names = list(model.parameters)
    if len(args) > len(names):
        raise TypeError(f"{model.pipeline} takes at most {len(names)} arguments, but {len(args)} were given")
    bound = dict(zip(names, args, strict=False))
    twice = sorted(set(bound) & set(kwargs))
    if twice:
        raise TypeError(f"{model.pipeline} got {', '.join(twice)} twice: by position and by name")
    for name in kwargs:
        if name not in model.parameters and name not in OLD_NAMES:  # deprecated in most pipelines
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.8 if model.takes_any else 0.6)
            if model.takes_any and not near:
                continue  # diffusers ignores or uses it
            hint = f"; did you mean {near[0]!r}?" if near else f". It takes {', '.join(names)}"
            raise TypeError(f"{model.pipeline} takes no argument {name!r}{hint}")
    return {name: _plain(model, name, value) for name, value in {**bound, **kwargs}.items()}


def _plain(model: PipelineInfo, name: str, value: Any) -> Any:
    """Convert numpy numbers and tensors to Python numbers for sizes, counts, and arguments with a number as default."""
    is_number = name in (*SIDES, *COUNTS) or type(model.parameters.get(name)) in (int, float)
    return plain(value) if is_number else value


def noise_of_first(kwargs: Mapping[str, Any], plan: Plan, devices: Sequence[str], widths: Sequence[int]) -> bool:
    """Return whether the first rank has to sample for all, since they would sample different noise from one seed.

    `devices` and `widths`: of the call's ranks, see `Executor.random_widths`. Raises PlanError where no rank can.
    """
    given, types = kwargs.get("generator"), {*map(kind_of, devices)}
    generators = generators_of({"generator": given})
    by_cpu = bool(generators) and all(generator.device.type == "cpu" for generator in generators)
    if len(set(widths)) < 2 or (by_cpu and types != {"cpu"}):
        return False
    kinds = ", ".join(f"{device}: {width}" for device, width in zip(devices, widths, strict=True))
    different = f"the GPUs are of different kinds ({kinds} values side by side), so that torch samples different noise"
    if len(types) > 1:
        raise PlanError(
            f"{different}, and devices of types {sorted(types)} cannot have it from the first one: {SAMPLE_ON_CPU}"
        )
    if plan.data > 1 and isinstance(given, (list, tuple)):
        raise PlanError(
            f"{different}, and with data={plan.data} each of them samples by its own of {len(given)} generators: "
            f"{SAMPLE_ON_CPU}, or data=1, with which the first one samples for all"
        )
    return True


def check_call(model: PipelineInfo, kwargs: Mapping[str, Any]) -> None:
    """Raise PlanError for values that are invalid with any plan."""
    for name in PROMPTS:
        if name in kwargs:
            _check_prompt(name, kwargs[name], by_frame=FREE_NOISE in model.methods)
    for name in COUNTS:
        value = kwargs.get(name)
        if value is not None and not is_whole(value):
            raise PlanError(f"{name}={value!r}: it must be a whole number of at least 1")
    for name in SIDES:
        if kwargs.get(name) is not None:
            check_side(name, kwargs[name], model.size_unit)
    check_generator(kwargs.get("generator"))
    callback = kwargs.get(ON_STEP_END)
    if callback is not None and not callable(callback):
        raise PlanError(f"{ON_STEP_END}={callback!r:.80} is no function: give one of (pipe, step, timestep, tensors)")


def warn_of_unknown_words(model: PipelineInfo, kwargs: Mapping[str, Any]) -> None:
    """Log the words of the prompts that an embedded model has not learnt; not of a warm-up call."""
    prompts = [kwargs.get(name) for name in PROMPTS if kwargs.get(name) != ANY_PROMPT]
    text = " ".join(each if isinstance(each, str) else " ".join(_texts(each) or ()) for each in prompts)
    words = unknown_words(text, model.known_words)
    if words:
        log.warning(
            "the embedded model does not know %s: the words that it has learnt are %s",
            ", ".join(map(repr, words)),
            ", ".join(sorted(model.known_words)),
        )


def _texts(value: Any) -> Any:
    """Return the texts of a prompt that changes between frames, which are by frame; any other as it is."""
    return list(value.values()) if isinstance(value, dict) else value


def _check_prompt(name: str, value: Any, *, by_frame: bool) -> None:
    """Raise PlanError for what is no prompt. `by_frame`: the pipeline has prompts that change between frames."""
    value = _texts(value) if by_frame else value
    if value is None:
        return
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise PlanError(f"{name} is a {type(value).__name__}: give a text or a list of texts")
    if not value:
        raise PlanError(f"{name} is an empty list: give at least one text")
    wrong = [item for item in value if not isinstance(item, str)]
    if wrong:
        raise PlanError(f"{name} holds a {type(wrong[0]).__name__}: give a text or a list of texts")
    for text in value:
        _check_unicode(name, text)


def _check_unicode(name: str, text: str) -> None:
    """Raise PlanError for half of a pair of surrogates: what Python makes of a byte that it cannot decode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PlanError(
            f"{name} has {text[error.start]!r} at character {error.start + 1}, which is no character of Unicode: give "
            "the text in UTF-8, on a command line with a locale for it, such as LC_ALL=C.UTF-8"
        ) from None


def check_pipeline(pipe: Any, world_size: int) -> None:
    """Raise UnsupportedModel for an offloaded, spread, parallel or compiled pipeline on so many ranks."""
    if getattr(pipe, "hf_device_map", None):
        raise UnsupportedModel(
            "the pipeline is spread over devices by device_map: load it without, and give a plan with weights=sharded"
        )
    if is_offloaded(pipe) and world_size > 1:
        raise UnsupportedModel("the pipeline is offloaded to the CPU: pass it without offloading")
    refuse_parallel(pipe)
    if world_size > 1:
        refuse_compiled_denoisers(pipe)


def is_offloaded(pipe: Any) -> bool:
    """Whether diffusers moves the networks of a pipeline between devices."""
    return getattr(pipe, "_offload_device", None) is not None or bool(getattr(pipe, "_all_hooks", None))


def check_plan(model: PipelineInfo | SplitFacts, plan: Plan) -> None:
    """Raise UnsupportedModel or PlanError if no call of this model works with the plan."""
    _check_tensor(model, plan)
    if isinstance(plan.strategy, StructureGuidance):
        if plan.weights != "whole":
            raise PlanError(
                f"plan {plan} divides weights, for which all ranks have to run the same blocks, but with strategy "
                f"{plan.strategy.name} each rank runs patches of its own: use weights=whole, or strategy exact"
            )
        if plan.stage > 1:
            raise PlanError(
                f"plan {plan} divides the blocks into stages, but with strategy {plan.strategy.name} each rank runs "
                "patches of its own: give all devices to axis 'patch', or use strategy exact"
            )
        if plan.cfg > 1:
            raise PlanError(
                f"plan {plan} splits guidance over axis 'cfg', but strategy {plan.strategy.name} distributes the "
                f"guidance branches itself: give all devices to axis 'patch', patch={plan.cfg * plan.patch}"
            )
        return
    refuse_without_denoiser(model.pipeline, model.denoisers, plan)
    if plan.stage > 1 and plan.strategy.policy.resync is not None:
        raise PlanError(
            f"plan {plan}: `quality` and `budget` decide on exact steps by what changes in all blocks, of which each "
            "stage has a part: leave them out, or use stage=1"
        )
    if isinstance(plan.strategy, PipedStages) and not model.splits_into_tokens:
        raise UnsupportedModel(
            f"plan {plan}: strategy {plan.strategy.name} computes the tokens of a transformer in pieces, which "
            f"{', '.join(model.denoisers)} does not have: use strategy=exact with stage={plan.stage}"
        )
    if plan.patch > 1 and not (model.splits_into_bands or model.splits_into_tokens):
        raise UnsupportedModel(
            f"{', '.join(model.denoisers)} cannot be split over axis 'patch', which takes a network "
            "of convolutions and group norms, or one of transformer blocks. Use cfg=2 (guidance branches) or data=N "
            "(prompts)"
        )


def _check_tensor(model: PipelineInfo | SplitFacts, plan: Plan) -> None:
    if plan.tensor == 1:
        return
    if isinstance(plan.strategy, StructureGuidance):
        raise PlanError(
            f"plan {plan} divides features over axis 'tensor', for which all ranks run the same blocks, but with "
            f"strategy {plan.strategy.name} each rank runs patches of its own: use tensor=1, or strategy exact"
        )
    if model.denoisers and not model.splits_into_tokens:
        raise UnsupportedModel(
            f"{', '.join(model.denoisers)} cannot be split over axis 'tensor', which takes a network of transformer "
            "blocks. Use patch=N (bands), cfg=2 (guidance branches) or data=N (prompts)"
        )


def check_plan_for(model: PipelineInfo, plan: Plan, kwargs: Mapping[str, Any], devices: Sequence[str] = ()) -> None:
    """Raise PlanError if this call does not work with the plan, or the CPU ranks of `devices` lack memory for it."""
    check_plan(model, plan)
    size = model.size(kwargs)
    if isinstance(plan.strategy, StructureGuidance):
        _check_large(model, plan, plan.strategy, kwargs)
        ranks = sum(device == "cpu" for device in devices[: plan.world_size])
        if size is not None and ranks:
            check_room(model, size, 1 + model.guided(kwargs), ranks=ranks, free=free_memory())
    elif plan.patch > 1 and size is not None and model.splits_into_bands:
        _check_bands(model, plan, size)
    if plan.cfg > 1 and not model.guided(kwargs):
        reason = f"plan {plan} splits guidance over axis 'cfg', but this call uses none"
        raise PlanError(f"{reason}: {_way_to_guidance(model)}, or use cfg=1")
    if plan.data > 1:
        PromptSlice.of(kwargs, 0, plan.data)


def _way_to_guidance(model: PipelineInfo) -> str:
    """Return what a call without guidance would need to have it, in the words of its own arguments."""
    if model.guider_branches is not None:
        return "set pipe.guider to one that guides, such as ClassifierFreeGuidance(guidance_scale=5.0)"
    if model.guided_by_true_scale:
        return "pass true_cfg_scale > 1 and a negative_prompt"
    if model.distilled or model.guides_above == math.inf:
        return f"{model.pipeline} of a distilled model has none at any scale: use another model"
    scale = next((name for name in NAMED_FOR_GUIDANCE if name in model.parameters), None)
    if scale is None:
        return f"{model.pipeline} has none in any call"
    return f"pass {scale} > {model.guides_above:g} (with a negative prompt where the pipeline wants one)"


def _check_large(model: PipelineInfo, plan: Plan, strategy: StructureGuidance, kwargs: Mapping[str, Any]) -> None:
    """Raise PlanError for an image that is not large, or has fewer windows than ranks."""
    native, size = (strategy.native,) * 2 if strategy.native is not None else model.default_size, model.size(kwargs)
    if size is None or native is None:
        return
    patches, windows = units_of(size, native, model.size_unit, overlap=strategy.overlap, margin=strategy.margin)
    if patches == 1:
        raise PlanError(refusal_of(size, native))
    branches = 2 if model.guided(kwargs) else 1
    most = branches * max(patches, windows)
    if plan.patch > most:
        raise PlanError(
            f"{size[0]} x {size[1]} pixels are {patches} patches and then {windows} windows, of {branches} guidance "
            f"branches at most, but axis 'patch' has {plan.patch} ranks: use at most {most}"
        )


def _check_bands(model: PipelineInfo, plan: Plan, size: tuple[int, int]) -> None:
    side = {"rows": size[0], "columns": size[1], "auto": max(size)}[plan.split]
    name = "width" if plan.split == "columns" or (plan.split == "auto" and size[1] > size[0]) else "height"
    rows, unit = side // model.vae_scale, model.total_stride
    if rows // unit < plan.patch:
        needed = plan.patch * unit * model.vae_scale
        lines = "columns" if name == "width" else "rows"
        bands = f"{rows // unit} band{'s' * (rows // unit != 1)} of {unit} {lines}"
        raise PlanError(
            f"{rows} latent {lines} make {bands}, but axis 'patch' has {plan.patch} ranks: use at most "
            f"{max(1, rows // unit)}, or a {name} of at least {needed} pixels"
        )


def refuse_without_denoiser(pipeline: str, denoisers: Collection[Any], plan: Plan) -> None:
    """Raise UnsupportedModel for a plan that divides networks which the pipeline does not have."""
    if not denoisers and plan.world_size > plan.data:
        raise UnsupportedModel(
            f"a {pipeline} has no {', '.join(sum(DENOISERS, ()))} whose work plan {plan} could share: use data=N, for "
            "several prompts"
        )
