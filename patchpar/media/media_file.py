"""Reading of audio and video files: no formats that name other files, such as playlists, which FFmpeg would open."""

import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from patchpar.media.image_file import MOST_PIXELS, check_pixels

FORMATS = (
    *("mov", "matroska", "avi", "mpeg", "mpegts", "flv", "asf", "ogg", "nut", "mxf", "ivf", "gif", "apng"),
    *("h264", "hevc", "m4v", "mjpeg", "wav", "w64", "aiff", "au", "caf", "flac", "mp3", "aac", "ac3", "eac3", "amr"),
    *("dts", "wv", "tta", "ape"),
)
"""FFmpeg's names of demuxers; "mov" is MP4 too, "matroska" WebM."""
EBML, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
"""Elements of a Matroska file (RFC 9559, section 5.1): its header, and all that follows."""
UNKNOWN_SIZES = {b"AVI ": 2**32 - 1, b"WAVE": 0x7FFF0000}
"""By kind of RIFF file the size from which on it is that of a writer that does not know it."""
HEAD_BYTES = 256


@contextmanager
def open_media(source: Path | IO[bytes]) -> Iterator[Any]:
    """Open a file, or a file object, as a PyAV container. Raises av.FFmpegError, and OSError.

    Also for a file that was cut off, and at the end for one that was meanwhile: FFmpeg takes what is left of a
    Matroska, AVI or WAV file for all of it.
    """
    import av

    path = str(source) if isinstance(source, Path) else source
    with (
        av.open(path, options={"format_whitelist": ",".join(FORMATS)}) as container,
        source.open("rb") if isinstance(source, Path) else nullcontext(source) as file,
    ):
        _check_whole(file)
        for track in container.streams.video:
            track.codec_context.options = {"max_pixels": str(MOST_PIXELS)}  # of frames larger than the file says
        yield container
        _check_whole(file)


def _check_whole(file: IO[bytes]) -> None:
    """Raise av.InvalidDataError for a file with fewer bytes than it declares."""
    import av

    if not file.seekable():
        return
    position = file.seek(0, io.SEEK_CUR)
    file.seek(0)
    declared = _declared_bytes(file.read(HEAD_BYTES))
    size = file.seek(0, io.SEEK_END)
    file.seek(position)
    if size < declared:
        reason = f"it was cut off, and has {size} of {declared} bytes: copy it again, or repair it"
        raise av.InvalidDataError(errno.EINVAL, reason)


def _declared_bytes(head: bytes) -> int:
    """The length of a Matroska, AVI or WAV file by its first bytes; 0 for others, and where it was not known."""
    if head[:4] == b"RIFF" and head[8:12] in UNKNOWN_SIZES:
        size = int.from_bytes(head[4:8], "little")
        unwritten = head[8:12] == b"WAVE"  # writers count a last byte that they may leave out
        return 0 if size >= UNKNOWN_SIZES[head[8:12]] else 8 + size - unwritten
    if head[:4] != EBML:
        return 0
    size, begin = _ebml_size(head, 4)
    if head[begin + size : begin + size + 4] != SEGMENT:
        return 0
    size, begin = _ebml_size(head, begin + size + 4)
    return begin + size


def _ebml_size(head: bytes, at: int) -> tuple[int, int]:
    """The size of an element (RFC 8794, section 4), 0 if it is unknown, and where its data begin."""
    length = 9 - int.from_bytes(head[at : at + 1], "big").bit_length()
    size = int.from_bytes(head[at : at + length], "big") % 2 ** (7 * length)
    return (0 if size == 2 ** (7 * length) - 1 else size), at + length


def rate_of(track: Any) -> float | None:
    """Return the frames per second of a PyAV video track, None if unknown: on average, where the file has times."""
    rate = track.guessed_rate if track.start_time is None else track.average_rate
    return float(rate) if rate else None


def timed_frames(container: Any, otherwise: float) -> Iterator[tuple[float, Any]]:
    """Yield the frames of the first video track, each with the seconds since the first.

    `otherwise`: frames per second where the file says nothing. Raw H.264 and H.265 have no times: frames follow at the
    rate of the track. AVI has times in the order of decoding only. Raises av.FFmpegError.
    """
    track, first = container.streams.video[0], None
    apart = 1 / (rate_of(track) or otherwise)
    seconds = -apart
    for frame in container.decode(track):
        time = frame.dts if container.format.name == "avi" else frame.pts
        seconds = seconds + apart if time is None else float(time * frame.time_base)
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
