"""The second stage: overlapping windows of native size, and beside them the anchor where it keeps them in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.clock import StepClock
from patchpar.exchange import Door
from patchpar.highres.blending import Blend, whole_of_bands
from patchpar.highres.evaluation import Asked
from patchpar.highres.flow import Flow
from patchpar.highres.gathering import ANCHOR, PREDICTION, from_everyone, stack_spec, stacked
from patchpar.highres.interlace import Interlace
from patchpar.highres.layout import Spot
from patchpar.highres.level import Level
from patchpar.highres.method import Method
from patchpar.highres.structure import kept_in_place
from patchpar.highres.surroundings import Surroundings
from patchpar.highres.windows import Windows
from patchpar.highres.work import Unit, share_out
from patchpar.mesh import Axis
from patchpar.transport import Spec


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
    ) -> tuple[Tensor, Any]:
        """The whole prediction and one output as the denoiser gives it. `silent`: nothing is heard of other ranks."""
        axis, x_BCHW, branches = self._mesh[1], asked.layout.x_BCHW, asked.branches
        kept = self._method.kept * level.time / self._method.switch
        shares = share_out(len(windows) + (kept > 0), branches, axis.size)
        guide = self._guide(asked, interlace) if kept > 0 else None

        def shown(number: int) -> tuple[Tensor, Spot]:
            if number < len(windows):
                return windows.cut(x_BCHW, number), Spot(windows.window, windows.corners[number])
            assert guide is not None
            return guide, Spot(interlace.patch_size)

        self._surroundings.begin(windows, shares)
        own, like = asked.predictions(shares[axis.rank], shown, self._surroundings.around)
        self._surroundings.end(shares, silent=silent)
        one, where = next(iter(own.values())), f"step {self._clock.evaluation}"
        blend = Blend.of(windows, shares, branches)
        mine = blend.sums({unit: own[unit] for unit in shares[axis.rank]}, one)
        alone = axis.size == 1 or silent
        band = blend.own_band(mine, axis.rank, one.dtype) if alone else blend.band(self._mesh, where, mine, one.dtype)
        anchors = [tuple(unit for unit in units if unit.patch == len(windows)) for units in shares]
        in_anchor = one.new_empty((*one.shape[:-2], *interlace.patch_size))
        sent = {PREDICTION: [band], ANCHOR: stacked(anchors[axis.rank], own)}
        expected: dict[str, Callable[[int], list[Spec]]] = {
            PREDICTION: lambda place: blend.band_spec(place, mine, one.dtype),
            ANCHOR: lambda place: stack_spec(anchors[place], in_anchor),
        }
        found = from_everyone(self._mesh, where, sent, expected, silent=silent)
        whole = whole_of_bands([tensors[PREDICTION][0] for tensors in found])
        if guide is None:
            return whole, like
        return self._kept(level, interlace, (guide, _anchor_of(anchors, found)), (x_BCHW, whole), kept), like

    def _guide(self, asked: Asked, interlace: Interlace) -> Tensor:
        """What leads the windows, as the denoiser is shown it."""
        x_BCHW = asked.layout.x_BCHW
        if self._flow is None:
            return interlace.split(x_BCHW)[0]
        return self._flow.shown(x_BCHW, interlace, asked.branches)

    def _kept(
        self,
        level: Level,
        interlace: Interlace,
        guide: tuple[Tensor, Tensor],
        whole: tuple[Tensor, Tensor],
        strength: float,
    ) -> Tensor:
        """The whole prediction, its coarse structure drawn to the guide's. Pairs are what was shown and predicted."""
        x_BCHW, prediction = whole
        channels = min(x_BCHW.shape[1], prediction.shape[1])
        pair = x_BCHW[:, :channels].float(), prediction[:, :channels].float()
        clean = self._aged(level.clean(*(part[:, :channels].float() for part in guide)))
        kept = kept_in_place(level, interlace, clean, pair, strength)
        answer = torch.cat([kept.to(prediction.dtype), prediction[:, channels:]], 1)
        if self._flow is not None:
            self._flow.heard(level, guide[1], answer)
        return answer

    def _aged(self, fresh: Tensor) -> Tensor:
        """The estimate of the step before where guidance lags and there is one, else this step's."""
        call, now = max(0, self._clock.call), self._clock.evaluation
        at, past = self._leads.get(call, (now, fresh))
        self._leads[call] = (now, fresh)
        return past if self._method.guidance.lag and at == now - 1 and past.shape == fresh.shape else fresh


def _anchor_of(anchors: list[tuple[Unit, ...]], found: list[dict[str, list[Tensor]]]) -> Tensor:
    """The guide's prediction of all branches, in order."""
    parts = [tensors[ANCHOR][0] for units, tensors in zip(anchors, found, strict=True) if units]
    return torch.cat(parts).flatten(0, 1)
