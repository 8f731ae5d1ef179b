"""Audio at another sampling rate, piece by piece, with the samples that all pieces together would give.

FFmpeg's resampler does it, through PyAV: what lies above half of the new rate is filtered out and not folded back.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Resampler:
    """Mono samples (N,) in float32 from `rate` to `target` samples per second."""

    def __init__(self, rate: int, target: int) -> None:
        self.rate, self._resampler = rate, None if rate == target else _resampler(target)
        self._is_empty = True

    def push(self, samples: Tensor) -> Tensor:
        """More samples, and all that can be made of what has come: the filter holds back about a millisecond."""
        if self._resampler is None or not len(samples):
            return samples
        import av

        self._is_empty = False
        values = samples.detach().cpu().contiguous().numpy()[None]
        frame = av.AudioFrame.from_ndarray(values, format="flt", layout="mono")
        frame.sample_rate = self.rate
        return _joined(self._resampler.resample(frame))

    def end(self) -> Tensor:
        """What the filter held back. Nothing may be pushed any more."""
        if self._resampler is None or self._is_empty:
            return torch.zeros(0)
        return _joined(self._resampler.resample(None))


def _resampler(target: int) -> Any:
    import av

    return av.AudioResampler(format="flt", layout="mono", rate=target)


def _joined(frames: list[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate([frame.to_ndarray()[0] for frame in frames])) if frames else torch.zeros(0)
