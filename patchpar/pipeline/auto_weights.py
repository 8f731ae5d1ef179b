"""Where weights are with plan="auto", and what is said where a plan's weights do not fit: the fastest plan that does.

    whole  ->  encoders on one rank  ->  sharded, with resident blocks  ->  sharded  ->  hosted

The first of these that fits, by the formula of `models.dry_run.plan_memory`. Weights that take less than half of what
is free are whole, and nothing is computed. torch is imported only where a forecast is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchpar.errors import PatchparError, PlanError, UnsupportedModel
from patchpar.launch.host_memory import FreeMemory
from patchpar.models.task import ANY_PROMPT
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.plan import Plan

if TYPE_CHECKING:
    from patchpar.models.dry_run.call_memory import CallMemory
    from patchpar.models.dry_run.plan_memory import NetworkBytes, PlanMemory

USED = 0.95  # of what is free: allocators keep some of it
SMALL = 0.5  # of what is free: weights that take less leave enough for activations


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """The weights of every call with plan="auto". `plan`: for all devices; None where they are whole on every rank.

    `is_tight`: activations of an image of the default size may not fit beside them.
    """

    plan: Plan | None = None
    reason: str = ""
    is_tight: bool = False

    def applied_to(self, plan: Plan) -> Plan:
        """Return a plan of a call with these weights."""
        if self.plan is None:
            return plan
        return replace(plan, weights=self.plan.weights, resident=self.plan.resident, encoders=self.plan.encoders)


@dataclass(frozen=True, slots=True)
class ModelForecast:
    """Bytes of a model's networks, and of a call for an image of its default size; None where these are unknown."""

    networks: Mapping[str, NetworkBytes]
    call: CallMemory | None = None

    @property
    def activations(self) -> int:
        """Bytes of tensors beside the weights, on one device."""
        return 0 if self.call is None else self.call.peak

    @classmethod
    def of(cls, empty: Any) -> ModelForecast:
        """Return that of a pipeline on the meta device."""
        from patchpar.models.dry_run.dry_run import dry_run
        from patchpar.models.dry_run.plan_memory import network_bytes

        empty.set_progress_bar_config(disable=True)
        networks = network_bytes(empty)
        try:
            return cls(networks, dry_run(empty, prompt=ANY_PROMPT).memory)
        except (PatchparError, TypeError, ValueError, LookupError, AttributeError, RuntimeError):
            return cls(networks)  # it needs more than a prompt, or values

    @classmethod
    def of_folder(cls, folder: Path | None, options: Mapping[str, Any]) -> ModelForecast | None:
        """Return that of a model folder, with `options` of from_pretrained; None without one. Raises PlanError.

        None also for quantised weights, of which nothing is known before they are loaded.
        """
        if folder is None:
            return None
        from patchpar.models.dry_run.empty_pipeline import empty_pipeline
        from patchpar.models.loading import with_dtype

        others = {name: value for name, value in with_dtype(options).items() if name != "task"}
        try:
            return cls.of(empty_pipeline(folder, others))
        except UnsupportedModel:
            return None


def is_small(weight_bytes: int, devices: int, free: FreeMemory) -> bool:
    """Whether whole weights certainly fit on so many devices, or too little is known to say that they do not."""
    if free.device is not None:
        return weight_bytes <= SMALL * free.device
    return free.host is None or weight_bytes * devices <= SMALL * free.host


def choose_weights(model: ModelForecast, devices: int, free: FreeMemory) -> WeightChoice:
    """Return the weights of plans for all of so many devices. Raises PlanError where no plan fits."""
    usable, base = free.times(USED), Plan(patch=devices)
    divided = replace(model, call=None if model.call is None else model.call.divided(devices))
    for each in (model, divided):
        found = fitting(base, each, usable)
        if found is not None:
            return _choice(found, model, free, is_tight=False)
    alone = replace(model, call=None)
    for found in _plans(base, alone, usable):
        if not found.plan.resident and found.fits(usable):
            return _choice(found, model, free, is_tight=True)
    least = min(_plans(base, alone, usable), key=lambda each: (max(each.ranks), each.host))
    raise PlanError(
        f"no plan for {devices} device{'s' * (devices > 1)} has room for the weights: plan {least.plan} takes least, "
        f"{_amount(least)}, but {_free(free)} free: use more devices or a smaller dtype, or free some memory"
    )


def fitting(base: Plan, model: ModelForecast, free: FreeMemory) -> PlanMemory | None:
    """Return what the fastest plan that fits takes, with the axes of `base`; None where none fits."""
    if base.stage * base.tensor > 1:
        base = Plan(data=base.data, patch=base.world_size // base.data)
    whole = replace(base, weights="whole", resident=0, encoders="auto")
    return next((each for each in _plans(whole, model, free) if each.fits(free)), None)


def advice(base: Plan, model: ModelForecast | None, free: FreeMemory) -> str:
    """Return what `base` takes, term by term, and the advice to use the fastest plan that fits. It ends with a comma.

    The fastest whose weights fit, where activations of an image of the default size fit beside none. Empty without a
    forecast.
    """
    if model is None:
        return ""
    taken = f"plan {base} takes {_amount(_memory_of(base, model, free))}; "
    for each in (model, replace(model, call=None)):
        best = fitting(base, each, free)
        if best is not None and best.plan == base:  # the refusal counts otherwise
            return taken
        if best is not None:
            return f"{taken}use plan={str(best.plan)!r}, which takes {_amount(best)}, "
    return f"{taken}no plan for these devices has room for them: use more devices, "


def shortage(plan: Plan, model: ModelForecast | None, free: FreeMemory) -> str:
    """Return that a plan whose weights fit has no room for the rest of an image of the default size; empty if it has.

    With its memory, term by term, and the fastest plan that fits. Empty also without a forecast.
    """
    if model is None or model.call is None or _memory_of(plan, model, free).fits(free) is not False:
        return ""
    return (
        f"an image of the default size does not fit beside the weights: {_free(free)} free; "
        f"{advice(plan, model, free)}or generate smaller images"
    )


def _memory_of(plan: Plan, model: ModelForecast, free: FreeMemory) -> PlanMemory:
    from patchpar.models.dry_run.call_memory import NO_CALL
    from patchpar.models.dry_run.plan_memory import memory_of

    return memory_of(plan, model.networks, model.call or NO_CALL, on_gpus=free.device is not None)


def _plans(base: Plan, model: ModelForecast, free: FreeMemory) -> Iterator[PlanMemory]:
    from patchpar.models.dry_run.call_memory import NO_CALL
    from patchpar.models.dry_run.plan_memory import plans_by_cost

    yield from plans_by_cost(base, model.networks, model.call or NO_CALL, free)


def _choice(found: PlanMemory, model: ModelForecast, free: FreeMemory, *, is_tight: bool) -> WeightChoice:
    plan = found.plan
    if (plan.weights, plan.encoders) == ("whole", "auto"):
        return WeightChoice(is_tight=is_tight)
    whole = sum(each.whole for each in model.networks.values()) + model.activations
    parts = [f"weights={plan.weights}"] if plan.weights != "whole" else ["encoders=one"]
    parts += [f"resident={plan.resident}"] * bool(plan.resident)
    reason = (
        f"{','.join(parts)}, which takes {_amount(found)}: whole weights and activations take "
        f"{readable_bytes(whole)} on each rank, and {_free(free)} free"
    )
    tight = "; activations of an image of the default size may not fit" if is_tight else ""
    return WeightChoice(plan, reason + tight, is_tight)


def _amount(found: PlanMemory) -> str:
    host = f", and {readable_bytes(found.host)} of host memory" if found.host else ""
    return f"{readable_bytes(max(found.ranks))} on a device{host} ({found.terms})"


def _free(free: FreeMemory) -> str:
    host = "unknown" if free.host is None else f"{readable_bytes(free.host)} of host memory"
    return f"{host} are" if free.device is None else f"{readable_bytes(free.device)} of a device and {host} are"
