"""Several voices of one stream: a track for each, heard apart and played together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from patchpar.stream.audio.track import AudioTrack


class SpeakerTracks:
    """An AudioSource of one AudioTrack for each speaker. Those that have ended are silent until the last one ends."""

    def __init__(self, tracks: Sequence[AudioTrack]) -> None:
        self._tracks = tuple(tracks)

    def is_here(self, block: int) -> bool:
        """Whether all audio that block `block` needs is available."""
        return all(track.is_here(block) for track in self._tracks)

    def seconds_until_silence(self, block: int) -> float | None:
        """How long a block waits for its audio until silence takes its place: it is all there, or never."""
        return None

    def is_over(self, block: int) -> bool:
        """Whether all audio ends before this block begins."""
        return all(track.is_over(block) for track in self._tracks)

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """Return (inputs of AudioInputs.shape, with S speakers in the first dim, samples [N] of all) of a block."""
        inputs, samples = zip(*(track.take(block) for track in self._tracks), strict=True)
        return torch.cat(inputs), torch.stack(samples).sum(0).clamp(-1, 1)
