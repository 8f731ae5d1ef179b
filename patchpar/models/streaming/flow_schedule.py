"""Flow matching steps as pure functions of a table of noise levels, without the state of a diffusers scheduler.

x_t = (1 - sigma) x_0 + sigma noise, and the network predicts noise - x_0 (rectified flow, arXiv:2209.03003).

    euler      x + (sigma' - sigma) v                                     one noise per block
    renoise    (1 - sigma') x_0 + sigma' noise',   x_0 = x - sigma v      new noise each step, for distilled models
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_number, plain
from patchpar.shard.host_memory import to_device

CPU = torch.device("cpu")
Sampler = Literal["euler", "renoise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSchedule:
    """Noise levels `sigmas`, falling from at most 1 to 0, one more than there are steps. Raises PlanError."""

    sigmas: tuple[float, ...]
    sampler: Sampler = "euler"

    def __post_init__(self) -> None:
        falling = all(a > b for a, b in zip(self.sigmas, self.sigmas[1:], strict=False))
        if len(self.sigmas) < 2 or self.sigmas[0] > 1 or self.sigmas[-1] != 0 or not falling:
            raise PlanError(f"sigmas={self.sigmas}: noise levels fall from at most 1 to 0, in at least one step")
        if self.sampler not in ("euler", "renoise"):
            raise PlanError(f"sampler={self.sampler!r}: use 'euler' or 'renoise'")

    @classmethod
    def shifted(cls, steps: int, *, shift: float = 3.0, sampler: Sampler = "euler") -> "FlowSchedule":
        """Return even steps, moved towards higher noise levels by `shift` (arXiv:2403.03206, section 5.3.2)."""
        even = [1 - step / steps for step in range(steps + 1)]
        return cls(sigmas=tuple(shift * s / (1 + (shift - 1) * s) for s in even), sampler=sampler)

    def begun_at(self, level: float | None) -> "FlowSchedule":
        """Return as many steps from noise level `level` on, scaled; the same for None. Raises PlanError."""
        if level is None:
            return self
        level = plain(level)
        if not is_number(level, 0, 1) or not level:
            raise PlanError(f"strength={level!r:.80}: it must be above 0, and at most 1")
        return FlowSchedule(sigmas=tuple(s * level / self.sigmas[0] for s in self.sigmas), sampler=self.sampler)

    @property
    def steps(self) -> int:
        return len(self.sigmas) - 1

    def timestep(self, step: int) -> float:
        """Return the timestep, 0 to 1000, that the network is called with in `step`."""
        return 1000.0 * self.sigmas[step]

    def steps_above(self, level: float) -> range:
        """Return the steps that begin at noise level `level`, 0 to 1, or above."""
        return range(sum(sigma >= level for sigma in self.sigmas[:-1]))

    def noised(self, clean: Tensor, noise: Tensor) -> Tensor:
        """Return `clean` at the noise level of the first step, of any shape, computed in float32."""
        sigma = self.sigmas[0]
        return ((1 - sigma) * clean.float() + sigma * noise.float()).to(clean.dtype)

    def needs_noise(self, step: int) -> bool:
        """Whether new noise is added at the end of `step`."""
        return self.sampler == "renoise" and self.sigmas[step + 1] > 0

    def advance(self, step: int, x: Tensor, velocity: Tensor, noise: Tensor | None) -> Tensor:
        """Return `x` after `step`, all of the same shape, computed in float32. `noise`: new where `needs_noise`."""
        sigma, after = self.sigmas[step], self.sigmas[step + 1]
        if self.sampler == "euler":
            return (x.float() + (after - sigma) * velocity.float()).to(x.dtype)
        clean = x.float() - sigma * velocity.float()
        return (clean if noise is None else (1 - after) * clean + after * noise).to(x.dtype)


def keyed_noise(seed: int, block: int, step: int, shape: tuple[int, ...], device: torch.device = CPU) -> Tensor:
    """Return normal noise [*shape] in float32, generated on the CPU, for denoising step `step` of block number `block`.

    Philox, a counter-based generator (Salmon et al., SC 2011): the seed is its key, step and block are the upper half
    of its counter, so that no two samples overlap. Raises PlanError for a seed that is negative or above 64 bits.
    """
    if not 0 <= seed < 2**64:
        raise PlanError(f"seed={seed}: it must be at least 0 and below 2**64")
    key, counter = np.array([seed, 0], np.uint64), np.array([0, 0, step, block], np.uint64)
    counting = np.random.Philox(key=key, counter=counter)
    generated = np.random.Generator(counting).standard_normal(shape, dtype=np.float32)
    return to_device(torch.from_numpy(generated), device)
