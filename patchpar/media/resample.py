"""Resampling of audio in pieces. The samples are those of all pieces resampled at once.

Done by FFmpeg's resampler through PyAV: a low-pass filter removes frequencies above half of the new rate.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Resampler:
    """Resample mono audio in float32 from `rate` to `target` samples per second."""

    def __init__(self, rate: int, target: int) -> None:
        self.rate, self._is_empty = rate, True
        self._resampler: Any = None
        if rate != target:
            import av

            self._resampler = av.AudioResampler(format="flt", layout="mono", rate=target)

    def push(self, samples: Tensor) -> Tensor:
        """Resample the next samples [N]; returns those ready, [M]. The filter holds back about a millisecond."""
        if self._resampler is None or not len(samples):
            return samples
        import av

        self._is_empty = False
        values = samples.detach().cpu().contiguous().numpy()[None]
        frame = av.AudioFrame.from_ndarray(values, format="flt", layout="mono")
        frame.sample_rate = self.rate
        return _joined(self._resampler.resample(frame))

    def end(self) -> Tensor:
        """Return the samples that the filter held back, [M]. No `push` may follow."""
        if self._resampler is None or self._is_empty:
            return torch.zeros(0)
        return _joined(self._resampler.resample(None))


def _joined(frames: list[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate([frame.to_ndarray()[0] for frame in frames])) if frames else torch.zeros(0)
