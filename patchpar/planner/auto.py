"""The rule behind plan="auto", until the planner measures: stated, so that a user can argue with it.

1. Guidance on and an even number of devices: cfg=2. Exact, one prediction exchanged per step, half the work each.
2. The rest cuts the picture into bands, where the denoiser is a UNet, as far as every band keeps two units of rows.
3. Several prompts and nothing else to split: data.
4. A device that would not help stays idle, and the reason says so.
"""

from dataclasses import dataclass

from patchpar.models.description import Description
from patchpar.plan import Plan

UNITS_PER_BAND = 2  # below that, halos and waiting cost more than a further rank computes


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan and why."""

    plan: Plan
    reason: str


def choose(model: Description, devices: int, *, guided: bool, size: tuple[int, int] | None, prompts: int = 1) -> Choice:
    """The plan for one call on `devices` devices; `size` is height and width in pixels."""
    if devices == 1:
        return Choice(Plan(), "one device: the plain pipeline")
    reasons = []
    cfg = 2 if guided and devices % 2 == 0 else 1
    if cfg == 2:
        reasons.append("guidance is on: one branch per device pair")
    elif guided:
        reasons.append(f"guidance stays whole, because {devices} devices are odd")
    patch = _bands(model, devices // cfg, size)
    if patch > 1:
        reasons.append(f"the picture in {patch} bands")
    data = min(prompts, devices // (cfg * patch))
    if data > 1:
        reasons.append(f"{prompts} prompts over {data} groups")
    plan = Plan(data=data, cfg=cfg, patch=patch)
    idle = devices - plan.world_size
    if idle:
        why = (
            "no more bands fit" if model.splits_into_bands else f"{', '.join(model.denoisers)} cannot be cut into bands"
        )
        reasons.append(f"{idle} of {devices} devices idle: {why}")
    return Choice(plan, "; ".join(reasons) or "nothing to split")


def _bands(model: Description, devices: int, size: tuple[int, int] | None) -> int:
    if not model.splits_into_bands:
        return 1
    if size is None:
        return devices
    units = max(size) // model.vae_scale // model.total_stride
    return max(1, min(devices, units // UNITS_PER_BAND))
