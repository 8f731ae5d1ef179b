"""The second stage: overlapping windows of native size, and beside them the anchor where it keeps them in place."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.clock import StepClock
from patchpar.exchange import Door
from patchpar.highres.blending import Blend
from patchpar.highres.evaluation import Asked
from patchpar.highres.flow import Flow, Heard
from patchpar.highres.interlace import Interlace
from patchpar.highres.layout import Layout, Spot
from patchpar.highres.level import Level
from patchpar.highres.method import Method
from patchpar.highres.portion import Portion, Whole
from patchpar.highres.structure import kept_in_place
from patchpar.highres.surroundings import Surroundings
from patchpar.highres.windows import Windows
from patchpar.highres.work import own_of, scheduled
from patchpar.mesh import Axis


class DetailStage:
    """Steps of the second stage on one rank of an axis. `begin` belongs before every picture, `end` after it."""

    def __init__(self, method: Method, mesh: tuple[Door, Axis], clock: StepClock, denoiser: nn.Module) -> None:
        self._method, self._mesh, self._clock = method, mesh, clock
        self._surroundings = Surroundings(denoiser, mesh, clock, method.context)
        self._flow = Flow() if method.guide == "flow" else None
        self._leads: dict[int, tuple[int, Tensor]] = {}  # clean estimates by call, with their evaluation

    def begin(self, scheduler: Any, channels: int) -> None:
        """Begin a picture of so many latent channels. Raises PlanError for a scheduler that a guide cannot follow."""
        self.end()
        if self._flow is not None:
            self._flow.begin(scheduler, channels)

    def end(self) -> None:
        """End a picture: what is under way is taken in. Raises ExchangeError."""
        self._surroundings.reset()
        self._leads = {}
        if self._flow is not None:
            self._flow.end()

    def predict(
        self, asked: Asked, level: Level, windows: Windows, interlace: Interlace, *, silent: bool = False
    ) -> tuple[Portion, Any]:
        """Our portion of the prediction and one output as the denoiser gives it.

        `silent`: windows hear nothing of windows on other ranks.
        """
        axis, x_BCHW, branches = self._mesh[1], asked.layout.x_BCHW, asked.branches
        kept = self._method.kept * level.time / self._method.switch
        schedule = scheduled(len(windows) + (kept > 0), branches, axis.size, self._method.bands)
        shares = schedule.shares
        guide = self._guide(asked, interlace) if kept > 0 else None

        def shown(number: int) -> tuple[Tensor, Spot]:
            if number < len(windows):
                return windows.cut(x_BCHW, number), Spot(windows.window, windows.corners[number])
            assert guide is not None
            return guide, Spot(interlace.patch_size)

        self._surroundings.begin(windows, shares)
        own, like = asked.evaluated(schedule, axis.rank, shown, self._surroundings.around)
        self._surroundings.end(shares, silent=silent)
        one, ours = next(iter(own.values())), own_of(shares[axis.rank], own)
        blend = Blend.of(windows, shares, branches)
        portion = Portion(
            canvas_KBCHW=blend.sums(ours, one),
            covered_HW=blend.covered(axis.rank, one),
            dtype=one.dtype,
            windows=windows,
            shares=shares,
            guide={unit.branch: x for unit, x in ours.items() if unit.patch == len(windows)},
            guide_size=interlace.patch_size,
            finish=partial(self._finished, level, interlace, (asked.layout, guide), kept),
        )
        return portion, like

    def _guide(self, asked: Asked, interlace: Interlace) -> Tensor:
        """What leads the windows, as the denoiser is shown it."""
        x_BCHW = asked.layout.x_BCHW
        if self._flow is None:
            return interlace.split(x_BCHW)[0]
        return self._flow.shown(x_BCHW, interlace, asked.branches)

    def _finished(
        self, level: Level, interlace: Interlace, shown: tuple[Layout, Tensor | None], strength: float, whole: Whole
    ) -> Tensor:
        """The answer for the whole picture, its coarse structure drawn to the guide's.

        `shown`: what the denoiser was, of the picture and of the guide.
        """
        prediction = whole.prediction_BCHW
        if whole.guide_BChw is None or shown[1] is None:
            return prediction
        x_BCHW, guide_BChw = (x[: len(prediction)] for x in (shown[0].x_BCHW, shown[1]))
        channels = min(x_BCHW.shape[1], prediction.shape[1])
        pair = x_BCHW[:, :channels].float(), prediction[:, :channels].float()
        clean = self._aged(level.clean(guide_BChw[:, :channels].float(), whole.guide_BChw[:, :channels].float()))
        kept = kept_in_place(level, interlace, clean, pair, strength)
        answer = torch.cat([kept.to(prediction.dtype), prediction[:, channels:]], 1)
        if self._flow is not None:
            self._flow.heard(Heard(level, shown[0], whole.guide_BChw[:, : answer.shape[1]], answer))
        return answer

    def _aged(self, fresh: Tensor) -> Tensor:
        """The estimate of the step before where guidance lags and there is one, else this step's."""
        call, now = max(0, self._clock.call), self._clock.evaluation
        at, past = self._leads.get(call, (now, fresh))
        self._leads[call] = (now, fresh)
        return past if self._method.guidance.lag and at == now - 1 and past.shape == fresh.shape else fresh
