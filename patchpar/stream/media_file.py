"""Opening of audio and video files: no formats that name other files, such as playlists, which FFmpeg would open."""

from pathlib import Path
from typing import IO, Any

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


def upright(frame: Any) -> Any:
    """Return a PyAV video frame as a PIL image, turned as its file says: telephones video as they are held."""
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
