"""Length of this step in units of the previous one, as linear extrapolation from two values needs it."""

from typing import Any

import torch
from torch import Tensor

FARTHEST = 2.0  # limit of the extrapolation: steps that grow faster are cut to it


class StepExtrapolator:
    """The timesteps of the last evaluations. Nothing is read from the device, so there is no synchronisation."""

    def __init__(self) -> None:
        self._times: dict[int, Tensor | None] = {}

    def reset(self) -> None:
        """Begin an image."""
        self._times.clear()

    def step_ratio(self, evaluation: int, timestep: Any) -> Tensor | float:
        """Return (now - last) / (last - the one before), clamped to 0..2; 0 where both of these are one timestep.

        A scalar tensor, or a number: 1 where the call has no timestep, 0 while fewer than three are known.
        `timestep` is a number or a tensor of any shape, whose first value counts.
        """
        now = None if timestep is None else torch.as_tensor(timestep).detach().flatten()[0].float()
        self._times = {at: time for at, time in self._times.items() if evaluation - at in (0, 1, 2)} | {evaluation: now}
        if len(self._times) < 3:
            return 0.0
        last, before = self._times[evaluation - 1], self._times[evaluation - 2]
        if now is None or last is None or before is None:
            return 1.0
        went = last - before
        return torch.where(went == 0, 0.0, (now - last) / went).clamp(0.0, FARTHEST)


def timestep_of(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument `timestep` of a denoiser call whose parameters have these names; None where it has none."""
    if "timestep" in kwargs:
        return kwargs["timestep"]
    return dict(zip(names, args, strict=False)).get("timestep")
