"""Frames and sound of a stream as a fragmented MP4, piece by piece: a browser plays it while it is being made."""

import io
from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

from patchpar import PlanError

FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
QUICK = {"preset": "veryfast", "tune": "zerolatency", "crf": "20"}


class _Pieces(io.RawIOBase):
    """A file that hands on what is written to it."""

    def __init__(self, put: Callable[[bytes], object]) -> None:
        self._put = put

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._put(bytes(data))
        return len(data)


class FilmWriter:
    """H.264 at `fps`, with one channel of AAC if there is a `rate` of sound. Raises PlanError without PyAV."""

    def __init__(self, put: Callable[[bytes], object], *, fps: float, size: tuple[int, int], rate: int | None) -> None:
        if find_spec("av") is None:
            raise PlanError("films are made by PyAV, which is not installed: pip install 'patchpar[video]'")
        import av

        self._fps = Fraction(fps).limit_denominator(1000)
        self._container: Any = av.open(_Pieces(put), "w", format="mp4", options=FRAGMENTED)
        self._picture = self._container.add_stream("libx264", rate=self._fps, options=QUICK)
        self._picture.width, self._picture.height, self._picture.pix_fmt = size[0], size[1], "yuv420p"
        self._sound = None if rate is None else self._container.add_stream("aac", rate=rate, layout="mono")
        self._rate, self._frames, self._samples = rate, 0, 0

    def put(self, frames: Any, samples: Any = None) -> None:
        """Frames (F, H, W, 3) in uint8 and their sound (N,), -1 to 1. They begin with a picture that stands alone."""
        import av

        for number, values in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            frame.pts, frame.time_base = self._frames, 1 / self._fps
            frame.pict_type = av.video.frame.PictureType.I if number == 0 else av.video.frame.PictureType.NONE
            self._frames += 1
            self._container.mux(self._picture.encode(frame))
        if self._sound is not None and samples is not None and len(samples):
            frame = av.AudioFrame.from_ndarray(samples.astype("float32")[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = self._rate, self._samples, Fraction(1, self._rate or 1)
            self._samples += len(samples)
            self._container.mux(self._sound.encode(frame))

    def close(self) -> None:
        """What the encoders still hold, and the end of the file."""
        for stream in filter(None, (self._picture, self._sound)):
            self._container.mux(stream.encode())
        self._container.close()
