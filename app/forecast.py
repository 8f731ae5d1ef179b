"""What would run on so many devices: every plan there is, which one is chosen and why, and why others cannot be."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patchpar import Plan, PlanError, Run, StructureGuidance
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.report import readable_bytes
from patchpar.pipeline.validate import check_call, check_plan_for
from patchpar.plan.bands import split_bands
from patchpar.plan.link_model import LinkModel
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import AXIS_MEANINGS
from patchpar.plan.scalars import is_whole

MOST_DEVICES = 64
MOST_PROMPTS = 16
WIDTH, LINE = 420, 18  # of the drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """A call to be planned. Sizes in pixels. Raises PlanError."""

    devices: int
    height: int
    width: int
    guided: bool
    prompts: int = 1

    def __post_init__(self) -> None:
        for name, most in (("devices", MOST_DEVICES), ("prompts", MOST_PROMPTS), ("height", 65536), ("width", 65536)):
            value = getattr(self, name)
            if not is_whole(value, 1, most):
                raise PlanError(f"{name} {value!r}: it is a whole number from 1 to {most}")

    def arguments(self, known: Any) -> dict[str, Any]:
        """As the pipeline's call would have them."""
        prompts = ["a picture"] * self.prompts
        wanted = {"prompt": prompts if self.prompts > 1 else prompts[0], "height": self.height, "width": self.width}
        guidance: dict[str, Any] = {"guidance_scale": 4.0 if self.guided else 1.0}
        if "true_cfg_scale" in known:
            guidance = {"true_cfg_scale": 4.0, "negative_prompt": "nothing"} if self.guided else {}
        return {**wanted, **{name: value for name, value in guidance.items() if name in known}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOffer:
    """One plan. `refusal`: why it cannot do the call; empty where it can."""

    plan: Plan
    refusal: str = ""

    @property
    def work(self) -> str:
        """Who does what."""
        degrees = self.plan.degrees()
        if isinstance(self.plan.strategy, StructureGuidance):
            return f"patches and windows of native size, shared out between {degrees['patch']}"
        shares = [f"{meaning} ({degrees[name]} in all)" for name, meaning in AXIS_MEANINGS.items() if degrees[name] > 1]
        return f"each rank has {', '.join(shares)}" if shares else "one rank does everything"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """What is chosen, why, and all there is to choose from, the chosen one first."""

    chosen: Plan
    reason: str
    offers: tuple[PlanOffer, ...]


def forecast(model: Any, call: PlannedCall) -> PlanForecast:
    """For a model's PipelineInfo. Raises PlanError for a call that no plan can do."""
    arguments = call.arguments(model.parameters)
    check_call(model, arguments)
    choice = choose(model, call.devices, arguments)
    others = (plan for plan in plans(call.devices) if plan != choice.plan)
    offers = tuple(_tried(model, plan, arguments) for plan in (choice.plan, *others))
    return PlanForecast(chosen=choice.plan, reason=choice.reason, offers=offers)


def plans(devices: int) -> Iterator[Plan]:
    """Every way to use all the devices, exactly."""
    for cfg in (1, 2):
        for data in range(1, devices // cfg + 1):
            patch, rest = divmod(devices, cfg * data)
            if not rest:
                yield Plan(data=data, cfg=cfg, patch=patch)


def _tried(model: Any, plan: Plan, arguments: dict[str, Any]) -> PlanOffer:
    try:
        check_plan_for(model, plan, arguments)
    except ValueError as error:
        return PlanOffer(plan=plan, refusal=str(error))
    return PlanOffer(plan=plan)


def places(plan: Plan, rows: int, unit: int) -> list[tuple[int, int, int]]:
    """For each rank: its branch, its first row and the row after its last, of `rows` rows in multiples of `unit`."""
    bands = split_bands(rows, plan.patch, unit).starts if rows >= plan.patch * unit else None
    found = []
    for rank in range(plan.world_size):
        mesh = Mesh(rank, range(plan.world_size), **plan.degrees())
        band = mesh["patch"].rank
        first, end = (bands[band], bands[band + 1]) if bands else (0, rows)
        found.append((mesh["cfg"].rank, first, end))
    return found


def drawing(plan: Plan, model: Any, size: tuple[int, int]) -> str:
    """The picture, once for each branch of guidance, cut into what each rank has. Bands lie along the longer side.

    Windows of structure guidance move from step to step, and are not drawn.
    """
    if isinstance(plan.strategy, StructureGuidance):
        return ""
    height, width = size
    is_wide, long = width > height, max(size)
    unit = model.vae_scale * model.total_stride if model.splits_into_bands else model.size_unit
    share = WIDTH / (plan.cfg * width + (plan.cfg - 1) * width * 0.08)
    parts = []
    for rank, (branch, first, end) in enumerate(places(plan, long, unit)[: plan.cfg * plan.patch]):
        left = branch * width * 1.08 * share
        x, y = (left + first * share, 0.0) if is_wide else (left, first * share)
        w, h = ((end - first) * share, height * share) if is_wide else (width * share, (end - first) * share)
        parts.append(
            f'<rect class="place p{rank % 4}" x="{x:.1f}" y="{y + LINE:.1f}" width="{w:.1f}" height="{h:.1f}"/>'
            f'<text x="{x + w / 2:.1f}" y="{y + LINE + h / 2 + 4:.1f}" text-anchor="middle">{rank}</text>'
        )
    names = ("what the negative prompt says", "what the prompt says") if plan.cfg == 2 else ("the picture",)
    for branch, name in enumerate(names):
        parts.append(f'<text class="small" x="{branch * width * 1.08 * share:.1f}" y="12">{name}</text>')
    tall = height * share + LINE + 4
    return (
        f'<svg class="plan" viewBox="0 0 {WIDTH} {tall:.0f}" role="img" aria-label="plan {plan}">{"".join(parts)}</svg>'
    )


def link_verdict(run: Run | None, link: LinkModel) -> str:
    """What the last run's messages would cost on such a link, if nothing hid them."""
    if run is None or not run.steps or not any(run.bytes_per_step):
        return "Draw a picture on several devices first: its messages are then weighed here."
    rounds = max(_rounds(rank.trace) for rank in run.ranks)
    num_bytes = max(run.bytes_per_step)
    spent = link.seconds(rounds, num_bytes)
    step = run.seconds / run.steps
    return (
        f"A step of the last run (plan {run.plan}) took {step:.3f} s here, in which a rank sent "
        f"{readable_bytes(num_bytes)} and waited {rounds} times. One after the other, with nothing computed meanwhile, "
        f"these take {spent:.3f} s on a link of {link}: {spent / step:.0%} of such a step."
    )


def _rounds(trace: Any) -> int:
    """How often a rank waits in a step."""
    if trace is None:
        return 0
    steps = sum(event.what == "step" for event in trace.events)
    return round(sum(event.what == "wait" for event in trace.events) / max(1, steps))
