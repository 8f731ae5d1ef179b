"""Whether the denoiser calls of a plan are captured as graphs on this rank, and by what."""

import logging
from typing import Any

import torch

from patchpar.comm.transport import Transport
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.launch.accelerators import has_graphs
from patchpar.models.info import refuse_compiled_denoisers
from patchpar.pipeline.graph_option import WAY_OUT, are_wanted, why_no_graphs
from patchpar.pipeline.messages import CallOptions
from patchpar.plan.plan import Plan
from patchpar.shard.denoiser import SharedDenoiser
from patchpar.shard.graphs.recorder import StepRecorder, recorder_for
from patchpar.shard.graphs.step_graphs import StepGraphs

log = logging.getLogger(__name__)


def needs_hooks(pipe: Any, options: CallOptions, device: torch.device) -> bool:
    """Whether a plan of one rank on `device` is installed for its graphs alone. Raises UnsupportedModel.

    Not with graphs="auto" for a denoiser that is compiled as a whole, which may have graphs of its own.
    """
    plan, wanted = options.plan, options.graphs
    if not wanted or plan.world_size > 1 or not has_graphs(device.type):
        return False
    try:
        refuse_compiled_denoisers(pipe)
    except UnsupportedModel as error:
        if wanted is True:
            raise
        log.info("steps run without graphs: %s", error)
        return False
    return wanted is True or not why_no_graphs(plan)


def captured(
    found: SharedDenoiser | None, recorder: StepRecorder | None, wanted: bool | str | None
) -> SharedDenoiser | None:
    """Return a denoiser whose steady calls are replayed as graphs, if there is a recorder for them."""
    if found is not None and recorder is not None:
        level = logging.INFO if wanted is None else logging.WARNING
        found.use_graphs(StepGraphs(found.denoiser, recorder, found.mesh, required=wanted is True, level=level))
    return found


def recorder_of(plan: Plan, wanted: bool | str | None, transport: Transport) -> StepRecorder | None:
    """Return what captures the denoiser calls of a plan, as `graph_option` says; None: they run as always.

    Raises PlanError where graphs are required and cannot be.
    """
    if not are_wanted(wanted, plan) or (wanted is None and not has_graphs(transport.device.type)):
        return None
    reason = why_no_graphs(plan)
    try:
        if not reason:
            return recorder_for(transport, with_messages=plan.patch > 1)
    except UnsupportedModel as error:
        reason = str(error)
    if wanted is True:
        raise PlanError(f"graphs=True: {reason}: {WAY_OUT}")
    log.info("steps run without graphs: %s", reason)
    return None
