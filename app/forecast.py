"""Plan forecast for a number of devices: all plans, the chosen one with its reason, and why others are refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patchpar import Plan, PlanError, Run, StructureGuidance
from patchpar.models.task import ANY_PROMPT
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.validate import check_call, check_plan_for
from patchpar.plan.bands import split_bands
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.link_model import LinkModel
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import AXIS_MEANINGS
from patchpar.plan.scalars import is_whole

MAX_DEVICES = 64
MAX_PROMPTS = 16
WIDTH, LINE = 420, 18  # of the diagram, in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class CallToPlan:
    """A pipeline call to be planned. Sizes in pixels. Raises PlanError."""

    devices: int
    height: int
    width: int
    guided: bool
    prompts: int = 1

    def __post_init__(self) -> None:
        for name, limit in (("devices", MAX_DEVICES), ("prompts", MAX_PROMPTS), ("height", 65536), ("width", 65536)):
            value = getattr(self, name)
            if not is_whole(value, 1, limit):
                raise PlanError(f"{name} {value!r}: it is a whole number from 1 to {limit}")

    def arguments(self, known: Any) -> dict[str, Any]:
        """Keyword arguments of the pipeline's call."""
        prompts = [ANY_PROMPT] * self.prompts
        arguments = {"prompt": prompts if self.prompts > 1 else prompts[0], "height": self.height, "width": self.width}
        guidance: dict[str, Any] = {"guidance_scale": 4.0 if self.guided else 1.0}
        if "true_cfg_scale" in known:
            guidance = {"true_cfg_scale": 4.0, "negative_prompt": "nothing"} if self.guided else {}
        return {**arguments, **{name: value for name, value in guidance.items() if name in known}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOffer:
    """One plan. `refusal`: why it cannot run the call; empty where it can."""

    plan: Plan
    refusal: str = ""

    @property
    def work(self) -> str:
        """How the work is split between ranks."""
        degrees = self.plan.degrees()
        if isinstance(self.plan.strategy, StructureGuidance):
            return f"patches and windows of native size, split between {degrees['patch']} ranks"
        scales = [f"{meaning} ({degrees[name]} in all)" for name, meaning in AXIS_MEANINGS.items() if degrees[name] > 1]
        return f"each rank has {', '.join(scales)}" if scales else "one rank does everything"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """The chosen plan, the reason, and all plans, the chosen one first."""

    chosen: Plan
    reason: str
    offers: tuple[PlanOffer, ...]


def forecast(model: Any, call: CallToPlan) -> PlanForecast:
    """Plan the call for a model's PipelineInfo. Raises PlanError for a call that no plan can run."""
    arguments = call.arguments(model.parameters)
    check_call(model, arguments)
    choice = choose(model, call.devices, arguments)
    others = (plan for plan in plans(call.devices) if plan != choice.plan)
    offers = tuple(_checked(model, plan, arguments) for plan in (choice.plan, *others))
    return PlanForecast(chosen=choice.plan, reason=choice.explanation, offers=offers)


def plans(devices: int) -> Iterator[Plan]:
    """Every exact plan that uses all devices."""
    for cfg in (1, 2):
        for data in range(1, devices // cfg + 1):
            patch, rest = divmod(devices, cfg * data)
            if not rest:
                yield Plan(data=data, cfg=cfg, patch=patch)


def _checked(model: Any, plan: Plan, arguments: dict[str, Any]) -> PlanOffer:
    try:
        check_plan_for(model, plan, arguments)
    except ValueError as error:
        return PlanOffer(plan=plan, refusal=str(error))
    return PlanOffer(plan=plan)


def rank_regions(plan: Plan, rows: int, unit: int) -> list[tuple[int, int, int]]:
    """(guidance branch, first row, end row) of each rank, of `rows` rows in multiples of `unit`."""
    bands = split_bands(rows, plan.patch, unit).starts if rows >= plan.patch * unit else None
    found = []
    for rank in range(plan.world_size):
        mesh = Mesh(rank, range(plan.world_size), **plan.degrees())
        band = mesh["patch"].rank
        first, end = (bands[band], bands[band + 1]) if bands else (0, rows)
        found.append((mesh["cfg"].rank, first, end))
    return found


def plan_diagram(plan: Plan, model: Any, size: tuple[int, int]) -> str:
    """SVG of the image, once per guidance branch, with the region of each rank. Bands lie along the longer side.

    Windows of structure guidance move from step to step and are not shown.
    """
    if isinstance(plan.strategy, StructureGuidance):
        return ""
    height, width = size
    is_wide, long = width > height, max(size)
    unit = model.vae_scale * model.total_stride if model.splits_into_bands else model.size_unit
    scale = WIDTH / (plan.cfg * width + (plan.cfg - 1) * width * 0.08)
    parts = []
    for rank, (branch, first, end) in enumerate(rank_regions(plan, long, unit)[: plan.cfg * plan.patch]):
        left = branch * width * 1.08 * scale
        x, y = (left + first * scale, 0.0) if is_wide else (left, first * scale)
        w, h = ((end - first) * scale, height * scale) if is_wide else (width * scale, (end - first) * scale)
        parts.append(
            f'<rect class="place p{rank % 4}" x="{x:.1f}" y="{y + LINE:.1f}" width="{w:.1f}" height="{h:.1f}"/>'
            f'<text x="{x + w / 2:.1f}" y="{y + LINE + h / 2 + 4:.1f}" text-anchor="middle">{rank}</text>'
        )
    names = ("negative prompt", "prompt") if plan.cfg == 2 else ("the image",)
    for branch, name in enumerate(names):
        parts.append(f'<text class="small" x="{branch * width * 1.08 * scale:.1f}" y="12">{name}</text>')
    tall = height * scale + LINE + 4
    return (
        f'<svg class="plan" viewBox="0 0 {WIDTH} {tall:.0f}" role="img" aria-label="plan {plan}">{"".join(parts)}</svg>'
    )


def link_estimate(run: Run | None, link: LinkModel) -> str:
    """Cost of the last run's messages on such a link, if no computation overlapped them."""
    if run is None or not run.steps or not any(run.bytes_per_step):
        return "Generate an image on several devices first: the cost of its messages is then estimated here."
    rounds = max(_rounds(rank.trace) for rank in run.ranks)
    num_bytes = max(run.bytes_per_step)
    spent = link.seconds(rounds, num_bytes)
    step = run.seconds / run.steps
    return (
        f"A step of the last run (plan {run.plan}) took {step:.3f} s here; a rank sent "
        f"{readable_bytes(num_bytes)} and waited {rounds} times. Without overlap "
        f"these messages take {spent:.3f} s on a link of {link}: {spent / step:.0%} of such a step."
    )


def _rounds(trace: Any) -> int:
    """Number of waits of a rank per step."""
    if trace is None:
        return 0
    steps = sum(event.what == "step" for event in trace.events)
    return round(sum(event.what == "wait" for event in trace.events) / max(1, steps))
