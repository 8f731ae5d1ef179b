"""The second stage: overlapping windows of native size, and beside them the anchor where it keeps them in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchpar.clock import StepClock
from patchpar.exchange import Door
from patchpar.highres.blending import Blend, whole_of_bands
from patchpar.highres.evaluation import Asked
from patchpar.highres.gathering import ANCHOR, PREDICTION, from_everyone, stack_spec, stacked
from patchpar.highres.interlace import Interlace
from patchpar.highres.layout import Spot
from patchpar.highres.level import Level
from patchpar.highres.method import Method
from patchpar.highres.structure import kept_in_place
from patchpar.highres.windows import Windows
from patchpar.highres.work import Unit, share_out
from patchpar.mesh import Axis
from patchpar.transport import Spec


class DetailStage:
    """Steps of the second stage on one rank of an axis."""

    def __init__(self, method: Method, mesh: tuple[Door, Axis], clock: StepClock) -> None:
        self._method, self._mesh, self._clock = method, mesh, clock

    def predict(
        self, asked: Asked, level: Level, windows: Windows, interlace: Interlace, *, silent: bool = False
    ) -> tuple[Tensor, Any]:
        """The whole prediction and one output as the denoiser gives it. `silent`: nothing is heard of other ranks."""
        axis, x_BCHW, branches = self._mesh[1], asked.layout.x_BCHW, asked.branches
        kept = self._method.kept * level.time / self._method.switch
        shares = share_out(len(windows) + (kept > 0), branches, axis.size)

        def shown(number: int) -> tuple[Tensor, Spot]:
            if number < len(windows):
                return windows.cut(x_BCHW, number), Spot(windows.window, windows.corners[number])
            return interlace.split(x_BCHW)[0], Spot(interlace.patch_size)

        own, like = asked.predictions(shares[axis.rank], shown)
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
        if kept > 0:
            whole = _kept(level, interlace, _anchor_of(anchors, found), (x_BCHW, whole), kept)
        return whole, like


def _anchor_of(anchors: list[tuple[Unit, ...]], found: list[dict[str, list[Tensor]]]) -> Tensor:
    """The anchor's prediction of all branches, in order."""
    parts = [tensors[ANCHOR][0] for units, tensors in zip(anchors, found, strict=True) if units]
    return torch.cat(parts).flatten(0, 1)


def _kept(
    level: Level, interlace: Interlace, anchor_BChw: Tensor, whole: tuple[Tensor, Tensor], strength: float
) -> Tensor:
    x_BCHW, prediction = whole
    channels = min(x_BCHW.shape[1], prediction.shape[1])
    pair = x_BCHW[:, :channels].float(), prediction[:, :channels].float()
    kept = kept_in_place(level, interlace, anchor_BChw[:, :channels].float(), pair, strength)
    return torch.cat([kept.to(prediction.dtype), prediction[:, channels:]], 1)
