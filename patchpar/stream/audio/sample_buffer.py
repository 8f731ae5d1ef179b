"""`SampleBuffer`: audio samples in the pieces in which they came."""

from collections import deque

import torch
from torch import Tensor


class SampleBuffer:
    """Samples with the numbers `start` to `end` of an endless track. Adding a piece copies nothing."""

    def __init__(self) -> None:
        self._pieces: deque[Tensor] = deque()
        self.start = self.end = 0

    def push(self, samples_N: Tensor) -> None:
        """Append samples [N]."""
        if len(samples_N):
            self._pieces.append(samples_N)
            self.end += len(samples_N)

    def read(self, first: int, last: int) -> Tensor:
        """Return a copy [last - first] of the samples from number `first` until `last`, which must all be there."""
        found, start = [torch.zeros(0)], self.start
        for piece in self._pieces:
            if start >= last:
                break
            found.append(piece[max(0, first - start) : max(0, last - start)])
            start += len(piece)
        return torch.cat(found)

    def drop_before(self, number: int) -> None:
        """Drop the samples before this number."""
        while self._pieces and self.start + len(self._pieces[0]) <= number:
            self.start += len(self._pieces.popleft())
        if self._pieces and number > self.start:
            self._pieces[0] = self._pieces[0][number - self.start :]
            self.start = number

    def drop_from(self, number: int) -> None:
        """Drop the samples from this number on."""
        while self._pieces and self.end - len(self._pieces[-1]) >= number:
            self.end -= len(self._pieces.pop())
        if self._pieces and number < self.end:
            self._pieces[-1] = self._pieces[-1][: number - self.end]
            self.end = number
