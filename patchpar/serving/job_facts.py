"""What a policy has to know of a request: its shape, its steps, and how many devices it may have."""

import time

from patchpar.models.info import PipelineInfo
from patchpar.plan.plan import Plan
from patchpar.serving.batching import batch_key
from patchpar.serving.image_call import STEPS, ImageCall
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.scheduler import JobFacts
from patchpar.serving.scheduling.learnt_costs import CallShape
from patchpar.serving.scheduling.state import NEVER
from patchpar.serving.settings import ServedModel

STRENGTH = "strength"
UNKNOWN_STEPS = 50
"""diffusers' usual default, for a pipeline without one of its own."""


def facts_of(
    request: PipelineFields, call: ImageCall, served: ServedModel, model: PipelineInfo, policy: str
) -> JobFacts:
    """Return the facts of a request that is to be queued now."""
    width, height = call.size
    frames = call.arguments.get("num_frames") or model.parameters.get("num_frames") or 1
    left = NEVER if request.deadline_ms is None else request.deadline_ms / 1000
    plan = call.plan_of(served)
    name = str(plan) if isinstance(plan, Plan) else ""
    return JobFacts(
        shape=CallShape(width * height * frames, model.branches(call.arguments), name),
        steps=_steps(call, model) * call.count,
        degrees=(call.degree,) if call.degree else _degrees(served, plan, policy),
        deadline=time.monotonic() + left,
        priority=request.priority or 0,
        batch_key=None if frames > 1 else batch_key(call, is_exact=request.exactness == "exact"),
    )


def _steps(call: ImageCall, model: PipelineInfo) -> int:
    """Return how many steps an image takes: with `strength`, which begins with an image, only the last of them."""
    steps = int(call.arguments.get(STEPS) or model.parameters.get(STEPS) or UNKNOWN_STEPS)
    strength = call.arguments.get(STRENGTH, model.parameters.get(STRENGTH))
    return max(1, int(steps * strength)) if isinstance(strength, (int, float)) else steps


def _degrees(served: ServedModel, plan: Plan | str, policy: str) -> tuple[int, ...]:
    """Return the numbers of devices: what the plan or --per-request says, else powers of two, as a policy chooses."""
    most = served.devices_of(plan)
    if isinstance(plan, Plan) or served.per_request is not None or policy == "latency":
        return (most,)
    return tuple(sorted({2**power for power in range(most.bit_length())} | {most}))
