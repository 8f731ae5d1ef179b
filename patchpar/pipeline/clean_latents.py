"""What an image would become from a step on: the scheduler's estimate of the clean latents, for previews.

Latents of a step are mostly noise for half of the steps. The estimate is x0 of eps- and v-prediction (DDIM,
arXiv:2010.02502), data prediction of multistep solvers (DPM-Solver++, arXiv:2211.01095; UniPC, arXiv:2302.04867), and
of flow matching x - sigma * v (arXiv:2210.02747).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

STEP_ARGUMENTS = ("model_output", "timestep", "sample")  # of `scheduler.step`, in their order
DATA_PREDICTION = ("dpmsolver++", "sde-dpmsolver++", "data_prediction")  # algorithms that keep estimates of data


def latents_to_show(scheduler: Any, given: Sequence[Any], named: Mapping[str, Any], result: Any) -> Tensor:
    """Return the estimate of clean latents of the first image (1, ...), in float32 on the CPU, after a step.

    Arguments: see `clean_estimate`.
    """
    return _first(clean_estimate(scheduler, given, named, result))


def clean_estimate(scheduler: Any, given: Sequence[Any], named: Mapping[str, Any], result: Any) -> Tensor:
    """Return the estimate of clean latents [B, ...] after a step.

    `given`, `named`: positional and other arguments of that step. `result`: what it returned, whose latents are taken
    where the scheduler has no estimate.
    """
    values = tuple(result) if isinstance(result, tuple) else tuple(result.values())
    arguments = {**dict(zip(STEP_ARGUMENTS, given, strict=False)), **named}
    for estimate in (values[1] if len(values) > 1 else None, _of_flow(scheduler, arguments), _of_data(scheduler)):
        if isinstance(estimate, Tensor) and estimate.shape == values[0].shape:
            return estimate
    return values[0]


def last_latents(result: Any) -> Tensor:
    """Return the latents of the first image (1, ...) that a step returned, in float32 on the CPU."""
    return _first(result[0] if isinstance(result, tuple) else next(iter(result.values())))


def _first(latents: Tensor) -> Tensor:
    return latents[:1].detach().float().cpu()


def _of_flow(scheduler: Any, arguments: Mapping[str, Any]) -> Any:
    """Estimate of flow matching with one sigma for all latents."""
    is_flow = any(base.__name__ == "FlowMatchEulerDiscreteScheduler" for base in type(scheduler).__mro__)
    sample, velocity = arguments.get("sample"), arguments.get("model_output")
    if not is_flow or sample is None or velocity is None or arguments.get("per_token_timesteps") is not None:
        return None
    sigma = scheduler.sigmas[scheduler.step_index - 1]  # the step has advanced the index
    return sample.float() - sigma.to(sample.device) * velocity.float()


def _of_data(scheduler: Any) -> Any:
    """The last estimate that a multistep solver of data prediction keeps for its next steps."""
    config = getattr(scheduler, "config", {})
    predicts = config.get("predict_x0") or config.get("algorithm_type") in DATA_PREDICTION
    return (getattr(scheduler, "model_outputs", None) or [None])[-1] if predicts else None
