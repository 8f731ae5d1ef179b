"""Guidance of patches by the anchor: structure guidance of ASGDiffusion (arXiv:2412.06163), calibrated.

The paper interpolates noise predictions, e~ = e + w M (e_anchor - e), its equations 3 and 4. Patches have different
noise, so that the difference holds noise as well as structure, and some of a patch's noise is never removed. Here the
estimates of the clean latent are interpolated, x0~ = x0 + w M (x0_anchor - x0), which holds no noise. Both are affine
in the predictions, so that guiding every branch of classifier-free guidance is guiding their combination.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from torch import Tensor

from patchpar.plan.step_clock import StepClock
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.noise_level import NoiseLevel
from patchpar.strategies.structure.windows import Tiling

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """`space`: what is interpolated, "x0" (ours) or "eps" (the paper). `weight`: how far, at the first step.

    `decay`: "cosine" lets the weight fall to 0 at the switch, "none" keeps it. `align_samples`: interpolate the anchor
    at each patch's sample positions rather than use its values unchanged. `lag`: the age in steps of the anchor's
    prediction, 0 or 1. `masked`: weight positions by the anchor's attention to the words of the prompt.
    """

    space: Literal["x0", "eps"] = "x0"
    weight: float = 1.0
    decay: Literal["cosine", "none"] = "none"
    align_samples: bool = True
    lag: int = 0
    masked: bool = False

    def strength(self, progress: float) -> float:
        """Return the weight at `progress` through the first stage, from 0 to 1."""
        return self.weight * (0.5 + 0.5 * math.cos(math.pi * progress) if self.decay == "cosine" else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureTarget:
    """The target of the patches: the anchor's field (its x0 or its noise), and a mask in 0..1."""

    field_BChw: Tensor
    mask_B1hw: Tensor | None = None


class LaggedTarget(Generic[T]):
    """The targets of a step's denoiser calls; with `lag` each is replaced by that of the previous step."""

    def __init__(self, clock: StepClock, lag: int, shape_of: Callable[[T], tuple[int, ...]]) -> None:
        self._clock, self._lag, self._shape_of = clock, lag, shape_of
        self._targets: dict[int, tuple[int, T]] = {}  # by call, with their evaluation

    def reset(self) -> None:
        """Begin an image."""
        self._targets.clear()

    def of(self, fresh: T) -> T:
        """Return the previous step's target with lag if there is one of this shape, else the fresh one."""
        call, now = max(0, self._clock.call), self._clock.evaluation
        at, past = self._targets.get(call, (now, fresh))
        self._targets[call] = (now, fresh)
        return past if self._lag and at == now - 1 and self._shape_of(past) == self._shape_of(fresh) else fresh


def target_of(
    guidance: Guidance, level: NoiseLevel, x_BChw: Tensor, prediction_BChw: Tensor, mask: Tensor | None
) -> StructureTarget:
    """Return the target that the anchor's latent x_BChw and its prediction give. `mask`: [B, 1, h, w] in 0..1."""
    estimate = level.clean if guidance.space == "x0" else level.noise_in
    return StructureTarget(field_BChw=estimate(x_BChw, prediction_BChw), mask_B1hw=mask)


def guided(
    guidance: Guidance,
    level: NoiseLevel,
    interlace: Interlace,
    target: StructureTarget,
    patches: tuple[Tensor, Tensor],
    strength: float,
) -> Tensor:
    """Return predictions moved towards the target, x_NBChw. `patches`: latents and predictions. The anchor is kept."""
    x_NBChw, prediction_NBChw = patches
    spread = interlace.enlarge if guidance.align_samples else interlace.repeat
    estimate, slope = (level.clean, level.per_clean) if guidance.space == "x0" else (level.noise_in, level.per_noise)
    towards = spread(target.field_BChw) - estimate(x_NBChw, prediction_NBChw)
    if target.mask_B1hw is not None:
        towards = towards * spread(target.mask_B1hw).clamp(0, 1)
    change = strength * slope * towards
    change[0] = 0
    return prediction_NBChw + change


def anchored(interlace: Interlace, prediction_BCHW: Tensor, differ_BChw: Tensor, strength: float) -> Tensor:
    """Return a whole prediction, x_BCHW, with its coarse structure moved towards the guide's and its detail kept.

    `differ_BChw`: the guide's prediction minus the whole one at the anchor's samples; it is interpolated between them.
    """
    return prediction_BCHW + strength * interlace.join(interlace.enlarge(differ_BChw))


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`switch`: the time, from 1 (noise) to 0 (image), at which windows replace interlaced patches.

    `structure_strength`: how far windows are moved to the guide's structure at the switch; it falls to 0 with the time.
    `guide`: "anchor" is the anchor of the large latent, "flow" a separate image of native size, see `GuideTrajectory`.
    `context`: how far windows attend to one another, as a fraction of their sides. `native`: the side in pixels that
    the denoiser was trained for, None to read it from its configuration. `size_conditioning`: see `PatchInputs`.
    `bands`: how many neighbouring ranks are a team, see `Schedule`. `shared_noise`: the correlation of the patches'
    initial noise. `renoised`: fresh noise at the switch. `seed`: of all noise except the pipeline's.
    """

    guidance: Guidance = field(default_factory=Guidance)
    tiling: Tiling = field(default_factory=Tiling)
    switch: float = 0.35
    structure_strength: float = 1.0
    context: float = 0.0
    bands: int = 1
    guide: str = "anchor"
    native: int | None = None
    size_conditioning: str = "native"
    shared_noise: float = 0.0
    renoised: bool = False
    seed: int = 0

    def progress(self, time: float) -> float:
        """Return the progress through the first stage, 0 to 1, at a time within it."""
        return (1 - time) / (1 - self.switch)
