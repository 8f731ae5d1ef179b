"""Structure guidance: images larger than a model was trained for, after ASGDiffusion (Li et al., arXiv:2412.06163).

At high noise the latent is denoised as interlaced patches of native size; the first of them, the anchor, guides the
others, so that they agree on the structure. Below the switch the latent is cut into overlapping windows, which add the
detail. The paper interpolates noise predictions; by default the estimates of the clean latent are interpolated, which
keeps the noise statistics correct (docs/structure-guidance.md).

axis        patch: patches and windows of each guidance branch are distributed over the ranks
exchanged   predictions, once in a step, and the anchor's attention mask; with bands what exact patches exchange
when        fresh; with lag=1 the anchor guides with its prediction of the previous step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from patchpar.errors import PlanError
from patchpar.plan.exchange_policy import check_choice
from patchpar.plan.scalars import is_number, is_whole, make_plain
from patchpar.strategies.strategy import as_text

if TYPE_CHECKING:
    from torch import nn

    from patchpar.comm.collectives import Communicator
    from patchpar.plan.mesh import Axis
    from patchpar.plan.step_clock import StepClock
    from patchpar.shard.verification_cache import VerificationCache
    from patchpar.strategies.structure.denoiser import HighResDenoiser
    from patchpar.strategies.structure.structure import Method

PRESETS: dict[str, dict[str, Any]] = {
    "calibrated": {
        "space": "x0", "weight": 1.0, "decay": "none", "align_samples": True, "masked": False, "switch": 0.35,
        "structure_strength": 1.0, "size_conditioning": "native", "shared_noise": 0.0,
    },
    "paper": {
        "space": "eps", "weight": 0.5, "decay": "cosine", "align_samples": False, "masked": True, "switch": 0.5,
        "structure_strength": 0.0, "size_conditioning": "whole", "shared_noise": 0.9,
    },
}  # fmt: skip

OVERLAP = 0.5
CHOICES: dict[str, tuple[object, ...]] = {
    "preset": tuple(PRESETS),
    "space": (None, "x0", "eps"),
    "decay": (None, "cosine", "none"),
    "size_conditioning": (None, "native", "whole"),
    "lag": (0, 1),
    "guide": ("anchor", "flow"),
    "renoised": (True, False),
    "align_samples": (None, True, False),
    "masked": (None, True, False),
}
MOST = {
    "weight": 1.0,
    "switch": 1.0,
    "overlap": 0.9,
    "margin": 0.5,
    "context": 1.0,
    "structure_strength": 1.0,
    "shared_noise": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureGuidance:
    """Options; the preset gives the value of those that are None. Raises PlanError.

    `preset`: "calibrated", or "paper" for equations 3 and 4 (what the paper leaves open is our assumption). `space`:
    what is interpolated, "x0" or "eps". `weight`: how far, and `decay`: "none", or "cosine" to 0 at the switch.
    `align_samples`: towards the anchor interpolated at each patch's samples rather than its values. `masked`: only
    where the anchor attends to words. `lag`: 0, or 1 for the anchor of the previous step. `switch`: the time, from 1 to
    0, at which windows start. `overlap`: the fraction of a window that its neighbour covers too. `margin`: as few
    windows as without overlap, each larger by this fraction. `context`: how far a window's self-attention reaches
    beyond its border, as a fraction of its side, with stale keys and values (UNets only). `bands`: units left over
    after an equal assignment are split over teams of this many ranks, a divisor of their number (UNets only).
    `structure_strength`: how far the anchor guides coarse structure below the switch, for one more evaluation a step.
    `guide`: what guides there, the "anchor" of the large latent, or the "flow" of a separate image of native size: a
    cascade. `native`: the side in pixels that the model was trained for, where its configuration lacks it.
    `size_conditioning`: SDXL's size conditioning, that of a "native" image or of the "whole". `shared_noise`: the
    correlation of the patches' initial noise, 0 to 1. `renoised`: fresh noise at the switch. `seed`: of that noise, and
    of the shifts of windows.
    """

    name: ClassVar[str] = "structure"
    axis: ClassVar[str] = "patch"
    for_one_rank: ClassVar[bool] = True
    preset: Literal["calibrated", "paper"] = "calibrated"
    space: Literal["x0", "eps"] | None = None
    weight: float | None = None
    decay: Literal["cosine", "none"] | None = None
    align_samples: bool | None = None
    masked: bool | None = None
    lag: int = 0
    switch: float | None = None
    overlap: float = OVERLAP
    margin: float | None = None
    context: float = 0.0
    bands: int = 1
    structure_strength: float | None = None
    guide: Literal["anchor", "flow"] = "anchor"
    native: int | None = None
    size_conditioning: Literal["native", "whole"] | None = None
    shared_noise: float | None = None
    renoised: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        make_plain(self)
        for option, choices in CHOICES.items():
            check_choice(self.name, option, getattr(self, option), choices)
        if self.guide == "flow" and self.renoised:
            raise PlanError(f"{self.name}: renoised=true does not change the latent of guide=flow: use guide=anchor")
        for option, most in MOST.items():
            value = getattr(self, option)
            if not is_number(value, 0, most) and (value is not None or option in ("overlap", "context")):
                raise PlanError(f"{self.name}: {option}={value!r}: it is a number from 0 to {most:g}")
        self._check_counts()
        if self.switch == 0:
            raise PlanError(f"{self.name}: switch=0: windows run below it, so use a value above 0")
        self._refuse_unused()
        if self.bands > 1 and self.context:
            raise PlanError(f"{self.name}: windows with context are not split into bands: use context=0 or bands=1")

    def _refuse_unused(self) -> None:
        """Raise PlanError for an option that another one leaves without effect."""
        if self.guide == "flow" and self._chosen("structure_strength") == 0:
            of_preset = f", that of preset={self.preset}" if self.structure_strength is None else ""
            raise PlanError(
                f"{self.name}: guide=flow changes nothing with structure_strength=0{of_preset}: use a value above 0, "
                "or leave guide out"
            )
        if self.margin is not None and self.overlap != OVERLAP:
            raise PlanError(
                f"{self.name}: overlap={self.overlap:g} changes nothing with margin={self.margin:g}: leave one of them "
                "out"
            )

    def _check_counts(self) -> None:
        if not is_whole(self.bands):
            raise PlanError(f"{self.name}: bands={self.bands!r}: it is a number of ranks, 1 for no teams")
        if not is_whole(self.seed, 0, 2**63 - 1):
            raise PlanError(f"{self.name}: seed={self.seed!r}: it is a whole number from 0 to 2**63 - 1")
        if self.native is not None and not is_whole(self.native, 8):
            raise PlanError(f"{self.name}: native={self.native!r}: it is a side in pixels, such as 1024")

    def _chosen(self, option: str) -> Any:
        value = getattr(self, option)
        return PRESETS[self.preset][option] if value is None else value

    @property
    def method(self) -> Method:
        """The options as the denoiser needs them."""
        from patchpar.strategies.structure.structure import (
            Guidance,
            Method,  # a caller that only names a strategy need not import torch
        )
        from patchpar.strategies.structure.windows import Tiling

        guidance = {option: self._chosen(option) for option in ("space", "weight", "decay", "align_samples", "masked")}
        rest = {
            option: self._chosen(option)
            for option in ("switch", "structure_strength", "size_conditioning", "shared_noise")
        }
        return Method(
            guidance=Guidance(**guidance, lag=self.lag),
            tiling=Tiling(overlap=self.overlap, margin=self.margin, moved=self.context == 0),
            context=self.context,
            bands=self.bands,
            guide=self.guide,
            native=self.native,
            renoised=self.renoised,
            seed=self.seed,
            **rest,
        )

    def check_group_size(self, num_ranks: int) -> None:
        """Raise PlanError unless `bands` divides the ranks. The largest number of ranks depends on the image size."""
        from patchpar.strategies.structure.sizing import check_teams

        check_teams(num_ranks, self.bands)

    def install(
        self,
        denoiser: nn.Module,
        comm: Communicator,
        axis: Axis,
        *,
        pipe: Any,
        clock: StepClock | None = None,
        verifications: VerificationCache | None = None,
    ) -> HighResDenoiser:
        """Return `denoiser`, which belongs to `pipe`, evaluated as patches over `axis`. Only bands are verified."""
        from patchpar.strategies.structure.denoiser import HighResDenoiser

        return HighResDenoiser(denoiser, (comm, axis), self.method, pipe=pipe, clock=clock, verifications=verifications)

    def __str__(self) -> str:
        return as_text(self)
