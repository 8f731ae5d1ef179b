"""The first stage: interlaced patches, each the whole picture at native size, led by the first of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from patchpar.clock import StepClock
from patchpar.exchange import Door
from patchpar.highres.attention_map import AttentionMap, Recording
from patchpar.highres.content import Content
from patchpar.highres.evaluation import Asked
from patchpar.highres.gathering import (
    MASK,
    PREDICTION,
    Shares,
    by_unit,
    from_everyone,
    stack_spec,
    stacked,
    whole_of,
)
from patchpar.highres.interlace import Interlace
from patchpar.highres.layout import Spot
from patchpar.highres.level import Level
from patchpar.highres.method import Method
from patchpar.highres.structure import Lead, guided, lead_of
from patchpar.highres.work import Evaluation, Unit, share_out
from patchpar.mesh import Axis
from patchpar.transport import Spec


class StructureStage:
    """Steps of the first stage on one rank of an axis. `reset` belongs before every picture."""

    def __init__(
        self, method: Method, mesh: tuple[Door, Axis], clock: StepClock, attention: AttentionMap, content: Content
    ) -> None:
        self._method, self._mesh, self._clock = method, mesh, clock
        self._attention, self._content = attention, content
        self._mask: tuple[int, Tensor] | None = None  # of this step's first call, with its evaluation
        self._leads: dict[int, tuple[int, Lead]] = {}  # by call, with their evaluation

    def reset(self) -> None:
        """Begin a picture."""
        self._mask, self._leads = None, {}

    def predict(self, asked: Asked, level: Level, interlace: Interlace, *, silent: bool = False) -> tuple[Tensor, Any]:
        """The whole prediction and one output as the denoiser gives it. `silent`: nothing is heard of other ranks."""
        axis, size = self._mesh[1], interlace.patch_size
        x_NBChw = interlace.split(asked.layout.x_BCHW)
        asks = 1 if self._only_follow(level) else len(interlace)
        shares = share_out(asks, asked.branches, axis.size)
        watcher = self._watcher(asked, size)
        own, like = asked.predictions(shares[axis.rank], lambda patch: (x_NBChw[patch], Spot(size)), watcher.around)
        one = next(iter(own.values()))
        sent = {PREDICTION: stacked(shares[axis.rank], own)}
        expected: dict[str, Callable[[int], list[Spec]]] = {PREDICTION: lambda place: stack_spec(shares[place], one)}
        if watcher.wanted:
            owner, spec = _owner(shares, watcher.unit), Spec((one.shape[0], 1, *size), torch.float32)
            sent[MASK] = [watcher.mask(one, size)] if owner == axis.rank else []
            expected[MASK] = lambda place: [spec] if place == owner else []
        found = from_everyone(self._mesh, f"step {self._clock.evaluation}", sent, expected, silent=silent)
        if watcher.wanted:
            mask = next(tensors[MASK][0] for tensors in found if tensors[MASK])
            self._mask = (self._clock.evaluation, mask)
        predictions = by_unit(shares, found)
        patches = torch.stack([whole_of(predictions, patch, asked.branches) for patch in range(asks)])
        patches = patches.expand(len(interlace), *patches.shape[1:])
        return interlace.join(self._guided(level, interlace, x_NBChw, patches, asked.branches)), like

    def _only_follow(self, level: Level) -> bool:
        """Whether nothing of what the others predict is left, so that only the anchor need be asked."""
        guidance = self._method.guidance
        whole = guidance.strength(self._method.progress(level.time)) == 1
        return whole and guidance.space == "x0" and not (guidance.masked and self._attention.layers)

    def _guided(
        self, level: Level, interlace: Interlace, x_NBChw: Tensor, patches_NBChw: Tensor, branches: int
    ) -> Tensor:
        guidance = self._method.guidance
        channels = min(x_NBChw.shape[2], patches_NBChw.shape[2])  # more are a picture to fill in, or a variance
        x, prediction = x_NBChw[:, :, :channels].float(), patches_NBChw[:, :, :channels].float()
        mask = self._mask[1].repeat(branches, 1, 1, 1) if self._mask is not None and guidance.masked else None
        lead = self._aged(lead_of(guidance, level, x[0], prediction[0], mask))
        strength = guidance.strength(self._method.progress(level.time))
        led = guided(guidance, level, interlace, lead, (x, prediction), strength).to(patches_NBChw.dtype)
        return torch.cat([led, patches_NBChw[:, :, channels:]], 2)

    def _aged(self, fresh: Lead) -> Lead:
        """The lead of the step before where the guidance lags and there is one of this form; else this step's."""
        call, now = max(0, self._clock.call), self._clock.evaluation
        at, past = self._leads.get(call, (now, fresh))
        self._leads[call] = (now, fresh)
        fits = self._method.guidance.lag and at == now - 1 and past.field_BChw.shape == fresh.field_BChw.shape
        return past if fits else fresh

    def _watcher(self, asked: Asked, size: tuple[int, int]) -> "_Watcher":
        """Attention is recorded in a step's first call, which has the prompt; a second has the negative prompt."""
        _, kwargs = asked.layout.call
        text = kwargs.get("encoder_hidden_states")
        wanted = self._method.guidance.masked and bool(self._attention.layers) and self._clock.call <= 0
        if not wanted or not isinstance(text, Tensor):
            return _Watcher(self._attention, None, Unit(0, asked.branches - 1))
        weights = self._content.weights(len(asked.layout.x_BCHW) // asked.branches, text.shape[1])
        return _Watcher(self._attention, weights.to(text.device), Unit(0, asked.branches - 1))


class _Watcher:
    """Records the attention of the anchor's last branch, which is the one with the prompt."""

    def __init__(self, attention: AttentionMap, weights_BT: Tensor | None, unit: Unit) -> None:
        self._attention, self._weights_BT, self.unit = attention, weights_BT, unit
        self._recording: Recording | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to record."""
        return self._weights_BT is not None

    def around(self, evaluation: Evaluation) -> AbstractContextManager[object]:
        """What is entered for a call of the denoiser."""
        if self._weights_BT is None or evaluation.patch != self.unit.patch:
            return nullcontext()
        if self.unit.branch not in evaluation.branches:
            return nullcontext()
        self._recording = Recording(self._weights_BT)
        return self._attention.listening(self._recording)

    def mask(self, like: Tensor, size: tuple[int, int]) -> Tensor:
        """The mask (B, 1, h, w), 1 everywhere where no attention was seen."""
        found = None if self._recording is None else self._recording.mask(size)
        return torch.ones(len(like), 1, *size, device=like.device) if found is None else found


def _owner(shares: Shares, unit: Unit) -> int:
    return next(place for place, units in enumerate(shares) if unit in units)
