"""The noise level of a denoiser call: its time, its signal and noise, and the clean latent that a prediction implies.

The denoiser's input is x = signal * x0 + noise * e with every scheduler: those of the sigma family (Karras et al.,
arXiv:2206.00364) scale their sample down before the call. Flow matching has signal = 1 - noise.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel

KINDS = ("epsilon", "v_prediction", "sample", "flow")
LEAST_SIGNAL = 1e-3
"""Below it there is noise alone, as where schedulers with zero terminal SNR begin (arXiv:2305.08891)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLevel:
    """`time` runs from 1 to 0: noise, image. `predicts`: one of KINDS."""

    time: float
    signal: float
    noise: float
    predicts: str

    def clean(self, x: Tensor, prediction: Tensor) -> Tensor:
        """Return the estimate of x0; x, the prediction and the result have the same shape."""
        if self.predicts == "epsilon":
            return (x - self.noise * prediction) / self.signal
        if self.predicts == "v_prediction":
            return self.signal * x - self.noise * prediction
        return prediction if self.predicts == "sample" else x - self.noise * prediction

    def noise_in(self, x: Tensor, prediction: Tensor) -> Tensor:
        """Return the estimate of the noise, for flow matching the predicted velocity; all of the same shape."""
        if self.predicts == "v_prediction":
            return self.noise * x + self.signal * prediction
        return (x - self.signal * prediction) / self.noise if self.predicts == "sample" else prediction

    @property
    def per_clean(self) -> float:
        """Derivative of the prediction by the estimate of x0, with x fixed."""
        slopes = {"epsilon": -self.signal / self.noise, "sample": 1.0}
        return slopes.get(self.predicts, -1 / self.noise)

    @property
    def per_noise(self) -> float:
        """Derivative of the prediction by the result of `noise_in`, with x fixed."""
        if self.predicts == "v_prediction":
            return 1 / self.signal
        return -self.noise / self.signal if self.predicts == "sample" else 1.0  # flow matching begins without signal


def level_of(scheduler: Any, timestep: Any, *, step: int | None = None) -> NoiseLevel:
    """Return the level at the denoiser's `timestep`, in `step` or the current one. Raises as `kind_of` does."""
    kind = kind_of(scheduler)
    given = float(torch.as_tensor(timestep).detach().flatten()[0])
    span = scheduler.config.get("num_train_timesteps", 1000)
    if kind == "flow":
        sigma = _in_steps(scheduler, given, span, step) / span
        return NoiseLevel(time=sigma, signal=1 - sigma, noise=sigma, predicts=kind)
    power = _interpolated(scheduler.alphas_cumprod, given)
    return NoiseLevel(time=given / span, signal=math.sqrt(power), noise=math.sqrt(1 - power), predicts=kind)


def kind_of(scheduler: Any) -> str:
    """Return what a denoiser predicts, one of KINDS. Raises UnsupportedModel for a scheduler without noise levels."""
    if _is_flow(scheduler):
        return "flow"
    config = scheduler.config
    kind: str = config.get("prediction_type", "epsilon")
    known = getattr(scheduler, "alphas_cumprod", None) is not None
    if not known or kind not in KINDS or config.get("timestep_type", "discrete") != "discrete":
        raise UnsupportedModel(
            f"{type(scheduler).__name__} with prediction_type={kind!r} does not give the noise level of a timestep: "
            "structure guidance needs a scheduler with alphas_cumprod, or of flow matching"
        )
    return kind


def refuse_thresholding(scheduler: Any) -> None:
    """Raise PlanError for a scheduler that clips large values of x0, which conflicts with guidance in x0."""
    if scheduler.config.get("thresholding", False):
        raise PlanError(
            f"{type(scheduler).__name__} has thresholding=True, which is made for denoisers of pixels: switch it off, "
            "pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, thresholding=False)"
        )


def refuse_without_signal(level: NoiseLevel, space: str) -> None:
    """Raise PlanError where noise is interpolated, space "eps", and says nothing of a prediction at this level."""
    if space == "eps" and level.predicts in ("v_prediction", "sample") and level.signal < LEAST_SIGNAL:
        raise PlanError(
            f"space=eps interpolates noise, but at time {level.time:g} there is nothing else (a signal of "
            f"{level.signal:.0e}, zero terminal SNR), so that no {level.predicts} follows from it: use space=x0"
        )


def _is_flow(scheduler: Any) -> bool:
    config = scheduler.config
    flows = config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas", False)
    return flows or "FlowMatch" in type(scheduler).__name__


def _in_steps(scheduler: Any, given: float, span: int, step: int | None) -> float:
    """Return the time in timesteps: some pipelines (FLUX) pass it to the denoiser as a number from 0 to 1."""
    present = scheduler.step_index if scheduler.step_index is not None else scheduler.begin_index or 0
    now = float(scheduler.timesteps[present if step is None else step])
    return min((given, given * span), key=lambda time: abs(time - now))


def _interpolated(alphas_cumprod: Tensor, timestep: float) -> float:
    """Return the signal power at a fractional timestep, linear in log(noise / signal) between two timesteps."""
    last = len(alphas_cumprod) - 1
    below = min(max(math.floor(timestep), 0), last)
    powers = [float(alphas_cumprod[index]) for index in (below, min(below + 1, last))]
    odds = [math.log((1 - power) / max(power, 1e-12)) for power in powers]
    fraction = timestep - below if below < last else 0.0
    return 1 / (1 + math.exp(odds[0] + fraction * (odds[1] - odds[0])))
