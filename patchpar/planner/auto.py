"""The rule behind plan="auto", until the planner measures: stated, so that a user can argue with it.

0. A picture of at least 1.5 times the model's native size on both sides: structure guidance, on one device too, for the
   picture does not depend on the number of devices. Where the pipeline cannot do it, the reason says so.
1. Guidance on and an even number of devices: cfg=2. Exact, one prediction exchanged per step, half the work each.
   With an odd number too, if the devices cannot all have a band: two that help are better than one.
2. The rest cuts the picture into bands, where the denoiser is a UNet, as far as every band keeps two units of rows;
   of any other denoiser it splits the tokens, as far as every device keeps two rows of them.
3. Several prompts and nothing else to split: data.
4. A device that would not help stays idle, and the reason says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from patchpar.errors import UnsupportedModel
from patchpar.highres.footprint import Footprint
from patchpar.highres.geometry import is_large, units_of
from patchpar.models.description import Description
from patchpar.plan import Plan
from patchpar.strategies.data import PICTURES
from patchpar.strategies.structure_guidance import StructureGuidance

ADDRESSED = ("ip_adapter_masks", "gligen")  # in cross_attention_kwargs: places in the whole picture
UNITS_PER_BAND = 2  # below that, halos and waiting cost more than a further rank computes


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and why."""

    plan: Plan
    reason: str


def choose(model: Description, devices: int, kwargs: Mapping[str, Any]) -> Choice:
    """The plan for a call with `kwargs` on `devices` devices."""
    size, native = model.size(kwargs), model.default_size
    if model.kept_native is None or size is None or native is None or not is_large(size, native):
        return _exact(model, devices, kwargs)
    ratios = dict.fromkeys(f"{side / own:.3g}" for side, own in zip(size, native, strict=True))
    large = f"{' x '.join(ratios)} times the native {native[0]} x {native[1]}"
    addressed = [name for name in kwargs.get("cross_attention_kwargs") or () if name in ADDRESSED]
    why_not = f"{addressed[0]} has places in the whole picture" if addressed else model.kept_native
    if why_not:
        plain = _exact(model, devices, kwargs)
        return Choice(plain.plan, f"{plain.reason}; {large}, but no structure guidance: {why_not}")
    strategy = StructureGuidance()
    branches = 2 if model.guided(kwargs) else 1
    most = branches * max(units_of(size, native, model.size_unit, overlap=strategy.overlap, margin=strategy.margin))
    patch = min(devices, most)
    idle = f"; {devices - patch} of {devices} devices idle: no more windows" if patch < devices else ""
    takes = Footprint.of(model, size, branches)
    return Choice(Plan(patch=patch, strategy=strategy), f"{large}: structure guidance{idle}; about {takes}")


def _exact(model: Description, devices: int, kwargs: Mapping[str, Any]) -> Choice:
    """The plan that draws what plain diffusers draws."""
    if devices == 1:
        return Choice(Plan(), "one device: the plain pipeline")
    guided, size, prompts = model.guided(kwargs), model.size(kwargs), _spreadable(kwargs)
    cfg = 2 if guided and (devices % 2 == 0 or _bands(model, devices, size) < devices) else 1
    patch = _bands(model, devices // cfg, size)
    data = max(1, min(prompts, devices // (cfg * patch)))
    plan = Plan(data=data, cfg=cfg, patch=patch)
    reasons = []
    if cfg == 2:
        reasons.append("guidance is on: a branch for each half of the devices")
    elif guided:
        reasons.append(f"guidance stays whole, because {devices} devices are odd")
    if patch > 1:
        reasons.append(f"the picture in {patch} bands" if model.splits_into_bands else f"tokens split in {patch}")
    if data > 1:
        reasons.append(f"{prompts} prompts over {data} groups")
    if plan.world_size < devices:
        reasons.append(f"{devices - plan.world_size} of {devices} devices idle: {_why_no_more(model, guided, devices)}")
    return Choice(plan, "; ".join(reasons))


def without(model: Description, plan: Plan, error: Exception) -> Description | None:
    """The model less what an automatic plan tried and could not do; None where that is not what failed."""
    if isinstance(plan.strategy, StructureGuidance):
        return replace(model, kept_native=str(error))
    if plan.patch == 1 or not model.splits_into_tokens or not isinstance(error, UnsupportedModel):
        return None
    return replace(model, splits_into_tokens=False, kept_whole=str(error))


def _spreadable(kwargs: Mapping[str, Any]) -> int:
    """How many prompts may be spread over ranks; pictures as input may belong to all of them."""
    prompts = kwargs.get("prompt")
    alone = isinstance(prompts, list) and all(kwargs.get(name) is None for name in PICTURES)
    return len(prompts) if isinstance(prompts, list) and alone else 1


def _why_no_more(model: Description, guided: bool, devices: int) -> str:
    if model.splits_into_bands:
        return "no more bands fit into the picture"
    if model.splits_into_tokens:
        return "each needs two rows of tokens"
    why = model.kept_whole or f"{', '.join(model.denoisers)} cannot be split"
    return why if guided else f"{why}, and there is no guidance to split"


def _bands(model: Description, devices: int, size: tuple[int, int] | None) -> int:
    if not (model.splits_into_bands or model.splits_into_tokens):
        return 1
    if size is None:
        return devices
    unit = model.vae_scale * model.total_stride if model.splits_into_bands else model.size_unit
    return max(1, min(devices, max(size) // unit // UNITS_PER_BAND))
