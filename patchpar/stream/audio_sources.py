"""The audio of a stream, from what its caller gives: a file, samples, live audio, silence, or several voices."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.media.audio_file import AudioFile, read_audio
from patchpar.models.files import path_of
from patchpar.stream.audio_track import AudioInputs, AudioSource, AudioTrack, KeepAlive

Voice = tuple[Tensor, int] | str | Path | AudioFile
Audio = Voice | list[Voice] | None


def audio_source(config: AudioInputs | None, frames: int, audio: Audio, *, keep_alive: bool) -> AudioSource | None:
    """Return the audio of a stream with blocks of `frames` latent frames; None for a model that takes none.

    Silence for a model that takes audio where there is none. Raises PlanError.
    """
    is_live = isinstance(audio, str) and audio == "live"
    if keep_alive and not is_live:
        raise PlanError("keep_alive=True fills gaps between pushes of audio: pass audio='live', or leave it out")
    if config is None:
        if audio is not None:
            raise PlanError("this model takes no audio: its folder has no transformer/audio.json; leave audio=None")
        return None
    if isinstance(audio, list):
        return SpeakerTracks([_with_voice(AudioTrack(config, frames), voice, config.rate) for voice in audio])
    track = AudioTrack(config, frames, KeepAlive() if keep_alive else None)
    if audio is None:
        track.be_silent()
        return track
    return track if is_live else _with_voice(track, audio, config.rate)


def check_voices(audio: Audio, masks: int | None, *, hears_several: bool) -> None:
    """Raise PlanError unless there are as many masks as voices. `masks`: their number; None for none."""
    if not isinstance(audio, list) and masks is None:
        return
    voices = len(audio) if isinstance(audio, list) else 1
    if voices != masks or not isinstance(audio, list) or not voices:
        raise PlanError(f"{voices} voices in audio= and {masks or 0} masks=: give lists with one of each per speaker")
    if not hears_several:
        raise PlanError("masks=: this model has one voice; Wan-S2V and Live Avatar take several, so leave masks= out")
    if any(isinstance(voice, str) and voice == "live" for voice in audio):
        raise PlanError("audio='live' is one voice: give files or (samples, rate) for several")


def _with_voice(track: AudioTrack, voice: Voice, rate: int) -> AudioTrack:
    """Return the track with all of a voice."""
    if isinstance(voice, tuple):
        track.push(torch.as_tensor(voice[0]), voice[1])
        track.end()
    elif isinstance(voice, AudioFile) and voice.rate == rate:
        track.play(voice.pieces())
    elif isinstance(voice, (str, Path, AudioFile)):
        source = voice.source if isinstance(voice, AudioFile) else path_of(voice)
        track.play(read_audio(source, rate).pieces())
    else:
        raise PlanError(f"audio={voice!r}: give a file, (samples, rate), 'live', or None")
    return track


class SpeakerTracks(AudioSource):
    """A whole AudioTrack for each speaker, played together. Those that have ended are silent until the last ends."""

    def __init__(self, tracks: Sequence[AudioTrack]) -> None:
        self._tracks = tuple(tracks)

    def is_over(self, block: int) -> bool:
        return all(track.is_over(block) for track in self._tracks)

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """Return (inputs of AudioInputs.shape, with S speakers in the first dim, samples [N] of all) of a block."""
        inputs, samples = zip(*(track.take(block) for track in self._tracks), strict=True)
        return torch.cat(inputs), torch.stack(samples).sum(0).clamp(-1, 1)
