"""The second stage: overlapping windows of native size, and beside them the anchor where it keeps them in place."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.structure.blending import BlendPlan
from patchpar.strategies.structure.evaluate import DenoiserCall
from patchpar.strategies.structure.guide_trajectory import GuidePrediction, GuideTrajectory
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.method import Method
from patchpar.strategies.structure.needed_regions import NeededRegions, WindowPlan
from patchpar.strategies.structure.noise_level import NoiseLevel
from patchpar.strategies.structure.partial_prediction import PartialPrediction, WholePrediction
from patchpar.strategies.structure.patch_inputs import PatchInputs, PatchPosition
from patchpar.strategies.structure.structure import kept_in_place
from patchpar.strategies.structure.window_context import WindowContext
from patchpar.strategies.structure.windows import Windows, Zone
from patchpar.strategies.structure.work_schedule import own_of, scheduled


class WindowStage:
    """Steps of the second stage on one rank of an axis. `begin` belongs before every picture, `end` after it."""

    def __init__(self, method: Method, mesh: tuple[Communicator, Axis], clock: StepClock, denoiser: nn.Module) -> None:
        self._method, self._mesh, self._clock = method, mesh, clock
        self._surroundings = WindowContext(denoiser, mesh, clock, method.context)
        self._flow = GuideTrajectory() if method.guide == "flow" else None
        self._leads: dict[int, tuple[int, Tensor]] = {}  # clean estimates by call, with their evaluation
        self._found: dict[tuple[WindowPlan, bool], NeededRegions] = {}

    def begin(self, scheduler: Any, channels: int) -> None:
        """Begin a picture of so many latent channels. Raises PlanError for a scheduler that a guide cannot follow."""
        self.end()
        if self._flow is not None:
            self._flow.begin(scheduler, channels)

    def end(self) -> None:
        """End a picture: what is under way is taken in. Raises ExchangeError."""
        self._surroundings.reset()
        self._leads, self._found = {}, {}
        if self._flow is not None:
            self._flow.end()

    def predict(
        self,
        asked: DenoiserCall,
        level: NoiseLevel,
        laid: tuple[Windows, tuple[Zone, ...]],
        interlace: Interlace,
        *,
        silent: bool = False,
        parted: bool = False,
    ) -> tuple[PartialPrediction, Any]:
        """Our portion of the prediction and one output as the denoiser gives it.

        `laid`: the windows of this step, and what they can show in any. `silent`: windows hear nothing of windows on
        other ranks. `parted`: ranks have the latents of their own windows only.
        """
        axis, x_BCHW, branches = self._mesh[1], asked.layout.x_BCHW, asked.branches
        (windows, zones), kept = laid, self._method.kept * level.time / self._method.switch
        guided = kept > 0 or (parted and self._method.kept > 0)  # at time 0 windows stay with who has their latents
        schedule = scheduled(len(windows) + guided, branches, axis.size, self._method.bands)
        course = WindowPlan(zones=zones, schedule=schedule, interlace=interlace)
        if not kept:
            schedule = schedule.without(len(windows))
        shares = schedule.shares
        guide = self._guide(asked, interlace) if kept > 0 else None

        def shown(number: int) -> tuple[Tensor, PatchPosition]:
            if number < len(windows):
                return windows.cut(x_BCHW, number), PatchPosition(windows.window, windows.corners[number])
            assert guide is not None
            return guide, PatchPosition(interlace.patch_size)

        self._surroundings.begin(windows, shares)
        own, like = asked.evaluated(schedule, axis.rank, shown, self._surroundings.around)
        self._surroundings.end(shares, silent=silent)
        one, ours = next(iter(own.values())), own_of(shares[axis.rank], own)
        blend = BlendPlan.of(windows, shares, branches)
        portion = PartialPrediction(
            canvas_KBCHW=blend.sums(ours, one),
            covered_HW=blend.covered(axis.rank, one),
            dtype=one.dtype,
            windows=windows,
            shares=shares,
            guide={unit.branch: x for unit, x in ours.items() if unit.patch == len(windows)},
            guide_size=interlace.patch_size,
            finish=partial(self._finished, level, interlace, (asked.layout, guide), kept),
            regions=self._regions(course, x_BCHW.device),
        )
        return portion, like

    def _guide(self, asked: DenoiserCall, interlace: Interlace) -> Tensor:
        """What leads the windows, as the denoiser is shown it."""
        x_BCHW = asked.layout.x_BCHW
        if self._flow is None:
            return interlace.split(x_BCHW)[0]
        return self._flow.shown(x_BCHW, interlace, asked.branches)

    def _finished(
        self,
        level: NoiseLevel,
        interlace: Interlace,
        shown: tuple[PatchInputs, Tensor | None],
        strength: float,
        whole: WholePrediction,
    ) -> Tensor:
        """The answer for the whole picture, its coarse structure drawn to the guide's.

        `shown`: what the denoiser was, of the picture and of the guide.
        """
        prediction = whole.prediction_BCHW
        if whole.guide_BChw is None or shown[1] is None:
            return prediction
        channels = min(shown[0].x_BCHW.shape[1], prediction.shape[1])
        pair = prediction[:, :channels].float(), whole.guide_BChw[:, :channels].float()
        kept = kept_in_place(interlace, pair[0], self._differ(level, interlace, shown, pair), strength)
        answer = torch.cat([kept.to(prediction.dtype), prediction[:, channels:]], 1)
        if self._flow is not None:
            self._flow.heard(GuidePrediction(level, shown[0], whole.guide_BChw[:, : answer.shape[1]], answer))
        return answer

    def _differ(
        self,
        level: NoiseLevel,
        interlace: Interlace,
        shown: tuple[PatchInputs, Tensor | None],
        pair: tuple[Tensor, Tensor],
    ) -> Tensor:
        """By how much the anchor should predict otherwise. `pair`: what is predicted of the picture, of the guide."""
        prediction, guide = pair
        first = interlace.split(prediction)[0]
        if self._leads_by_anchor:
            return guide - first  # both of the same latent, so that this needs none of it
        assert shown[1] is not None
        x_BCHW, guide_BChw = (x[: len(first), : first.shape[1]].float() for x in (shown[0].x_BCHW, shown[1]))
        clean = self._aged(level.clean(guide_BChw, guide))
        return level.per_clean * (clean - level.clean(interlace.split(x_BCHW)[0], first))

    @property
    def _leads_by_anchor(self) -> bool:
        """Whether what leads is this step's anchor: of no latent but the picture's, and of no other step."""
        return self._flow is None and not self._method.guidance.lag

    def _regions(self, course: WindowPlan, device: torch.device) -> Callable[[bool], NeededRegions] | None:
        """Where ranks need what is answered. None for everywhere: another guide is held against latents."""
        if not self._leads_by_anchor:
            return None

        def of(last: bool) -> NeededRegions:
            key = course, last
            if key not in self._found:
                self._found[key] = NeededRegions.of(course, last=last, device=device)
            return self._found[key]

        return of

    def _aged(self, fresh: Tensor) -> Tensor:
        """The estimate of the step before where guidance lags and there is one, else this step's."""
        call, now = max(0, self._clock.call), self._clock.evaluation
        at, past = self._leads.get(call, (now, fresh))
        self._leads[call] = (now, fresh)
        return past if self._method.guidance.lag and at == now - 1 and past.shape == fresh.shape else fresh
