"""Length of this step in units of the previous one, as linear extrapolation from two values needs it.

Ours: docs/decisions/0012. Forecasts of features by Taylor series are known from TaylorSeer (arXiv:2503.06923).
"""

from typing import Any

import torch
from torch import Tensor

KNOWN = 3  # evaluations: this one and those of the last two values
TIMES = ("timestep", "timesteps", "timestep_ratio", "t")  # of most; of HiDream, Stable Cascade, Z-Image
FARTHEST = 2.0  # limit of the extrapolation: steps that grow faster are cut to it


class StepExtrapolator:
    """The timesteps of the last evaluations. Nothing is read from the device, so there is no synchronisation.

    They lie in one tensor [3], which stays where it is: evaluation `e` in element `e % 3`.
    """

    def __init__(self) -> None:
        self._times = torch.empty(KNOWN, dtype=torch.float32).unbind()
        self._known: dict[int, bool] = {}  # evaluations, and whether their timesteps are known

    def reset(self) -> None:
        """Begin an image."""
        self._known.clear()

    def step_ratio(self, evaluation: int, timestep: Any) -> Tensor | float:
        """Return (now - last) / (last - the one before), clamped to 0..2; 0 where both of these are one timestep.

        A scalar tensor, or a number: 1 where the call has no timestep, 0 while fewer than three are known.
        `timestep` is a number or a tensor of any shape, whose largest value counts: tokens that are given, such as the
        first frame of a video, have timestep 0 in every step.
        """
        known = {at: has for at, has in self._known.items() if evaluation - at in range(KNOWN)}
        if timestep is not None:
            now = torch.as_tensor(timestep).detach().amax()
            if now.device != self._times[0].device:
                self._times, known = torch.empty(KNOWN, dtype=torch.float32, device=now.device).unbind(), {}
            self._times[evaluation % KNOWN].copy_(now)
        self._known = known | {evaluation: timestep is not None}
        if len(self._known) < KNOWN:
            return 0.0
        if not all(self._known.values()):
            return 1.0
        now, last, before = (self._times[(evaluation - age) % KNOWN] for age in range(KNOWN))
        # Steps of no length divide by zero.
        return ((now - last) / (last - before)).nan_to_num_(0.0, 0.0, 0.0).clamp_(0.0, FARTHEST)


def timestep_of(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the timestep of a denoiser call whose parameters have these names; None where it has none."""
    for name in TIMES:
        if name in kwargs:
            return kwargs[name]
        if name in names[: len(args)]:
            return args[names.index(name)]
    return None
