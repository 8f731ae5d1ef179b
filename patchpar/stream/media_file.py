"""Reading of audio and video files: no formats that name other files, such as playlists, which FFmpeg would open."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO, Any

from patchpar.models.image_file import check_pixels

FORMATS = (
    *("mov", "matroska", "avi", "mpeg", "mpegts", "flv", "asf", "ogg", "nut", "mxf", "ivf", "gif", "apng"),
    *("h264", "hevc", "m4v", "mjpeg", "wav", "w64", "aiff", "au", "caf", "flac", "mp3", "aac", "ac3", "eac3", "amr"),
    *("dts", "wv", "tta", "ape"),
)
"""FFmpeg's names of demuxers; "mov" is MP4 too, "matroska" WebM."""


def open_media(source: Path | IO[bytes]) -> Any:
    """Return the PyAV container of a file, or of a file object. Raises av.FFmpegError, and OSError."""
    import av

    file = str(source) if isinstance(source, Path) else source
    return av.open(file, options={"format_whitelist": ",".join(FORMATS)})


def rate_of(track: Any) -> float | None:
    """Return the frames per second of a PyAV video track, None if unknown: on average, where the file has times."""
    rate = track.guessed_rate if track.start_time is None else track.average_rate
    return float(rate) if rate else None


def timed_frames(container: Any, otherwise: float) -> Iterator[tuple[float, Any]]:
    """Yield the frames of the first video track, each with the seconds since the first.

    `otherwise`: frames per second where the file says nothing. Raw H.264 and H.265 have no times: frames follow at the
    rate of the track. Raises av.FFmpegError.
    """
    track, first = container.streams.video[0], None
    apart = 1 / (rate_of(track) or otherwise)
    for number, frame in zip(count(), container.decode(track)):
        seconds = number * apart if frame.time is None else float(frame.time)
        first = seconds if first is None else first
        yield seconds - first, frame


def displayed_image(frame: Any, track: Any, label: str) -> Any:
    """Return a frame of a PyAV video track as a PIL image, as its file says that it is shown.

    Turned, since telephones video as they are held, and with square pixels. `label`: its name, for the message. Raises
    PlanError for too many pixels.
    """
    width = max(1, round(frame.width * float(track.sample_aspect_ratio or 1)))
    check_pixels(max(width, frame.width), frame.height, label)
    image = frame.to_image()
    if width != frame.width:
        image = image.resize((width, frame.height))
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
