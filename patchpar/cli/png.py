"""PNG of large pictures: bands of rows compressed at the same time, each a chunk of one stream.

    rows      0 ... 511 | 512 ... 1023 | ...         a thread for each band, as many at once as there are cores
    chunks    IDAT        IDAT           ...         deflate blocks that end on a whole byte, so that they join

Compressing is the longest part of saving a large picture, and the only one that one core does alone.
"""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from PIL.Image import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"
ZLIB_HEADER = b"\x78\x9c"
UP = 2  # the filter: each byte less the one above it
TRUE_COLOR, DEPTH, LEVEL = 2, 8, 6
BAND = 256  # rows: many more than the window of deflate spans, so that a band loses next to nothing


def write_png(picture: Image, stream: BinaryIO, *, cores: int) -> None:
    """Write an RGB picture, `cores` bands at a time."""
    import numpy as np

    rows = np.asarray(picture).reshape(picture.height, 3 * picture.width)
    starts = range(0, len(rows), BAND)
    stream.write(SIGNATURE)
    head = struct.pack(">IIBBBBB", picture.width, picture.height, DEPTH, TRUE_COLOR, 0, 0, 0)
    stream.write(_chunk(b"IHDR", head) + _chunk(b"IDAT", ZLIB_HEADER))
    check = 1
    with ThreadPoolExecutor(max_workers=cores) as pool:
        for filtered, packed in pool.map(lambda start: _band(rows, start), starts):
            stream.write(_chunk(b"IDAT", packed))
            check = zlib.adler32(filtered, check)
    stream.write(_chunk(b"IDAT", struct.pack(">I", check)) + _chunk(b"IEND", b""))


def _band(rows: Any, start: int) -> tuple[bytes, bytes]:
    """Filtered rows of a band, and the same compressed."""
    import numpy as np

    own = rows[start : start + BAND]
    above = rows[start - 1 : start + len(own) - 1] if start else np.concatenate([np.zeros_like(own[:1]), own[:-1]])
    filtered = np.concatenate([np.full((len(own), 1), UP, np.uint8), own - above], axis=1).tobytes()
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    last = start + BAND >= len(rows)
    return filtered, packer.compress(filtered) + packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
