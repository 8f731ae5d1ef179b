"""The second stage: overlapping windows of native size, and the anchor where it guides their structure."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.structure.blending import BlendPlan
from patchpar.strategies.structure.evaluate import DenoiserCall
from patchpar.strategies.structure.guide_trajectory import GuidePrediction, GuideTrajectory
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.needed_regions import NeededRegions, WindowPlan
from patchpar.strategies.structure.noise_level import NoiseLevel
from patchpar.strategies.structure.partial_prediction import PartialPrediction, WholePrediction
from patchpar.strategies.structure.patch_inputs import PatchInputs, PatchPosition
from patchpar.strategies.structure.structure import LaggedTarget, Method, anchored
from patchpar.strategies.structure.window_context import WindowContext
from patchpar.strategies.structure.windows import Windows, Zone
from patchpar.strategies.structure.work_schedule import own_of, scheduled


class WindowStage:
    """Steps of the second stage on one rank of an axis. Call `begin` before every image, `end` after it."""

    def __init__(self, method: Method, mesh: AxisComm, clock: StepClock, denoiser: nn.Module) -> None:
        self._method, self._mesh, self._clock = method, mesh, clock
        self._window_context = WindowContext(denoiser, mesh, clock, method.context)
        self._flow = GuideTrajectory() if method.guide == "flow" else None
        self._target = LaggedTarget[Tensor](clock, method.guidance.lag, lambda each: each.shape)  # clean estimates
        self._found: dict[tuple[WindowPlan, bool], NeededRegions] = {}

    def begin(self, scheduler: Any, channels: int) -> None:
        """Begin an image of `channels` latent channels. Raises PlanError for a second-order scheduler with a guide."""
        self.end()
        if self._flow is not None:
            self._flow.begin(scheduler, channels)

    def end(self) -> None:
        """End an image: wait for pending exchanges. Raises ExchangeError."""
        self._window_context.reset()
        self._target.reset()
        self._found.clear()
        if self._flow is not None:
            self._flow.end()

    def discard(self) -> None:
        """End an image whose ranks may be gone: pending exchanges are not waited for."""
        self._window_context.discard()
        self.end()

    def predict(
        self,
        denoiser_call: DenoiserCall,
        level: NoiseLevel,
        laid: tuple[Windows, tuple[Zone, ...]],
        interlace: Interlace,
        *,
        silent: bool = False,
        parted: bool = False,
    ) -> tuple[PartialPrediction, Any]:
        """Return this rank's partial prediction and one output of the denoiser.

        `laid`: the windows of this step, and their zones in all steps. `silent`: windows get no context from other
        ranks. `parted`: ranks have the latents of their own windows only.
        """
        axis, x_BCHW, branches = self._mesh[1], denoiser_call.layout.x_BCHW, denoiser_call.branches
        (windows, zones), structure_strength = laid, self._method.structure_strength * level.time / self._method.switch
        guided = structure_strength > 0 or (
            parted and self._method.structure_strength > 0
        )  # at time 0 windows stay on the ranks that have their latents
        schedule = scheduled(len(windows) + guided, branches, axis.size, self._method.bands)
        window_plan = WindowPlan(zones=zones, schedule=schedule, interlace=interlace)
        if not structure_strength:
            schedule = schedule.without(len(windows))
        assignment = schedule.assignment
        guide = self._guide(denoiser_call, interlace) if structure_strength > 0 else None

        def patch_at(number: int) -> tuple[Tensor, PatchPosition]:
            if number < len(windows):
                return windows.cut(x_BCHW, number), PatchPosition(windows.window, windows.corners[number])
            assert guide is not None
            return guide, PatchPosition(interlace.patch_size)

        self._window_context.begin(windows, assignment)
        own, like = denoiser_call.evaluated(schedule, axis.rank, patch_at, self._window_context.around)
        self._window_context.end(assignment, silent=silent)
        one, ours = next(iter(own.values())), own_of(assignment[axis.rank], own)
        blend = BlendPlan.of(windows, assignment, branches)
        partial_prediction = PartialPrediction(
            canvas_KBCHW=blend.sums(ours, one),
            covered_HW=blend.covered(axis.rank, one),
            dtype=one.dtype,
            windows=windows,
            assignment=assignment,
            guide={unit.branch: x for unit, x in ours.items() if unit.patch == len(windows)},
            guide_size=interlace.patch_size,
            finish=partial(self._finished, level, interlace, (denoiser_call.layout, guide), structure_strength),
            regions=self._regions(window_plan, x_BCHW.device),
        )
        return partial_prediction, like

    def _guide(self, denoiser_call: DenoiserCall, interlace: Interlace) -> Tensor:
        """Return the denoiser's input for the guide of the windows: x_BChw."""
        x_BCHW = denoiser_call.layout.x_BCHW
        if self._flow is None:
            return interlace.split(x_BCHW)[0]
        return self._flow.guide_input(x_BCHW, interlace, denoiser_call.branches)

    def _finished(
        self,
        level: NoiseLevel,
        interlace: Interlace,
        inputs: tuple[PatchInputs, Tensor | None],
        strength: float,
        whole: WholePrediction,
    ) -> Tensor:
        """Return x_BCHW, the whole with its coarse structure moved to the guide's. `inputs`: of image and guide."""
        prediction = whole.prediction_BCHW
        if whole.guide_BChw is None or inputs[1] is None:
            return prediction
        channels = min(inputs[0].x_BCHW.shape[1], prediction.shape[1])
        pair = prediction[:, :channels].float(), whole.guide_BChw[:, :channels].float()
        moved = anchored(interlace, pair[0], self._differ(level, interlace, inputs, pair), strength)
        answer = torch.cat([moved.to(prediction.dtype), prediction[:, channels:]], 1)
        if self._flow is not None:
            self._flow.add(GuidePrediction(level, inputs[0], whole.guide_BChw[:, : answer.shape[1]], answer))
        return answer

    def _differ(
        self,
        level: NoiseLevel,
        interlace: Interlace,
        inputs: tuple[PatchInputs, Tensor | None],
        pair: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the change of the anchor's prediction, x_BChw. `pair`: predictions of the image and of the guide."""
        prediction, guide = pair
        first = interlace.split(prediction)[0]
        if self._leads_by_anchor:
            return guide - first  # both of the same latent, so that this needs none of it
        assert inputs[1] is not None
        x_BCHW, guide_BChw = (x[: len(first), : first.shape[1]].float() for x in (inputs[0].x_BCHW, inputs[1]))
        clean = self._target.of(level.clean(guide_BChw, guide))
        return level.per_clean * (clean - level.clean(interlace.split(x_BCHW)[0], first))

    @property
    def _leads_by_anchor(self) -> bool:
        """Whether the guide is the fresh anchor of the image's latent."""
        return self._flow is None and not self._method.guidance.lag

    def _regions(self, window_plan: WindowPlan, device: torch.device) -> Callable[[bool], NeededRegions] | None:
        """Return where ranks need the prediction. None for everywhere: another guide is compared with whole latents."""
        if not self._leads_by_anchor:
            return None

        def of(last: bool) -> NeededRegions:
            key = window_plan, last
            if key not in self._found:
                self._found[key] = NeededRegions.of(window_plan, last=last, device=device)
            return self._found[key]

        return of
