"""Sound brought to another rate, piece by piece, with the samples that all pieces together would give.

downwards    each sample is the mean of what lies in its time, in parts where it must be
upwards      a line between the two samples beside it
"""

from math import floor

import torch
from torch import Tensor
from torch.nn import functional

PIECE = 1 << 18
"""Samples that are computed at once."""


class Resampler:
    """Mono samples (N,) from `rate` to `target` samples per second."""

    def __init__(self, rate: int, target: int) -> None:
        self.rate, self._ratio = rate, rate / target
        self._kept = torch.zeros(0)
        self._start = 0  # number of the first sample that is kept
        self._made = 0

    def push(self, samples: Tensor) -> Tensor:
        """More samples, and all that can be made of what has come."""
        if self._ratio == 1:
            return samples
        self._kept = torch.cat([self._kept, samples])
        return self._make(self._ready(self._start + len(self._kept)))

    def end(self) -> Tensor:
        """What was held back until the next sample: there is none, so that the last one counts again."""
        if self._ratio == 1 or not len(self._kept):
            return self._kept
        end = round((self._start + len(self._kept)) / self._ratio)
        self._kept = functional.pad(self._kept[None], (0, 2 + int(self._ratio)), mode="replicate")[0]
        return self._make(end - self._made)

    def _ready(self, came: int) -> int:
        """How many more samples can be made of the first `came`."""
        end = floor((came - self._width) / self._ratio) + 2
        while end > self._made and self._first(end - 1) + self._width > came:
            end -= 1
        return max(0, end - self._made)

    def _first(self, made: int) -> int:
        """The first sample that sample `made` is made of."""
        return int(self._window(torch.tensor([made], dtype=torch.float64))[0])

    @property
    def _width(self) -> int:
        """Samples that one is made of."""
        return int(self._ratio) + 2 if self._ratio > 1 else 2

    def _window(self, made: Tensor) -> Tensor:
        """The first sample of those that samples `made` are made of."""
        first = made * self._ratio if self._ratio > 1 else (made + 0.5) * self._ratio - 0.5
        return first.floor().clamp_min(0).long()

    def _make(self, count: int) -> Tensor:
        pieces = [self._piece(min(PIECE, count - at)) for at in range(0, count, PIECE)]
        return torch.cat(pieces) if pieces else self._kept.new_zeros(0)

    def _piece(self, count: int) -> Tensor:
        made = torch.arange(self._made, self._made + count, dtype=torch.float64)
        first = self._window(made)
        place = first[:, None] + torch.arange(self._width)
        if self._ratio > 1:
            begin, end = (made * self._ratio)[:, None], ((made + 1) * self._ratio)[:, None]
            weights = (torch.minimum(place + 1.0, end) - torch.maximum(place.double(), begin)).clamp_min(0)
            weights = weights / weights.sum(1, keepdim=True)
        else:
            behind = (((made + 0.5) * self._ratio - 0.5).clamp_min(0) - first)[:, None]
            weights = torch.cat([1 - behind, behind], 1)
        found = (self._kept[place - self._start].double() * weights).sum(1).float()
        self._made += count
        self._forget(self._first(self._made))
        return found

    def _forget(self, start: int) -> None:
        gone = min(max(0, start - self._start), len(self._kept))
        self._kept, self._start = self._kept[gone:], self._start + gone
