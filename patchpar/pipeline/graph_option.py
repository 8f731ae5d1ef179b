"""The option `graphs` of a pipeline: steady denoiser calls are captured as graphs of the GPU and replayed.

None     "auto" where a plan has several ranks, False where it has one: the default
False    never
"auto"   where devices, plan and model allow it; a log line says where they do not
True     refused where they do not
"""

from collections.abc import Sequence

from patchpar.errors import PlanError
from patchpar.launch.accelerators import has_graphs, kind_of
from patchpar.plan.plan import Plan
from patchpar.strategies.structure.options import StructureGuidance

WAY_OUT = "use graphs='auto', which captures where it can, or graphs=False"


def check_graphs(value: object, devices: Sequence[str] | None) -> bool | str | None:
    """Return a checked option. `devices`: torch's names of all ranks' devices; None where each rank knows its own.

    Raises PlanError.
    """
    if value is not None and not isinstance(value, bool) and value != "auto":
        raise PlanError(f"graphs={value!r}: use True, False or 'auto'")
    without = [device for device in devices or () if not has_graphs(kind_of(device))]
    if value is True and without:
        raise PlanError(
            f"graphs=True: graphs are captured on CUDA devices, and this pipeline is on {', '.join(without)}: {WAY_OUT}"
        )
    return value if value is None or isinstance(value, bool) else str(value)


def are_wanted(graphs: bool | str | None, plan: Plan) -> bool:
    """Whether denoiser calls of a plan are to be captured where they can be."""
    return plan.world_size > 1 if graphs is None else bool(graphs)


def why_no_graphs(plan: Plan) -> str:
    """Return why the denoiser calls of a plan are not captured; empty if they are."""
    if isinstance(plan.strategy, StructureGuidance):
        return "structure guidance decides in each step which patches to compute"
    if plan.weights != "whole":
        return f"weights={plan.weights} brings weights of blocks into other memory in each step"
    if plan.tensor > 1 or plan.stage > 1:
        return "denoisers whose features or blocks are divided between ranks are not captured"
    return ""
