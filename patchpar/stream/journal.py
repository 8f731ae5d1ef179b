"""A stream taken down, so that it can be made again bit for bit: one line of JSON per block, after one that opens it.

    {"format": 1, "model": ..., "config": {...}, "options": {...}, "seed": ..., ...}           how it was begun
    {"block": 0, "epoch": 0, "frames": "9f...", "wishes": [{"kind": "Said", ...}], ...}        what came out

A line has what the block was made of (conditions that hold from it on, sound as the model hears it, sound as it is
played in 16 bits) and a digest of its frames. Sound takes about 30 kB a second, silence next to nothing; beyond `limit`
bytes no more is taken down, which is said once. A file whose end is missing is good up to there.
"""

import base64
import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.stream.config import StreamConfig
from patchpar.stream.driver import Came
from patchpar.stream.events import Parameter, Prompt, Reference
from patchpar.stream.talk import Said, Shown, Wish

FORMAT = 1
LIMIT = 2 * 2**30
WISHES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Said, Shown, Parameter, Prompt, Reference)}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How a stream was begun. `options`: those of from_pretrained. `size`: rows and columns of latents."""

    model: str
    config: StreamConfig
    options: Mapping[str, Any]
    seed: int
    fps: float
    size: tuple[int, int]
    versions: Mapping[str, str]


class Journal:
    """Takes down one stream in the file `path`. Raises PlanError if that cannot be."""

    def __init__(self, path: Path, origin: Origin, *, limit: int = LIMIT) -> None:
        self._path, self._limit, self._epoch = path, limit, -1
        self.blocks = self._size = 0
        head = {"format": FORMAT, **asdict(origin)}
        try:
            line = json.dumps(head)
        except TypeError as error:
            raise PlanError(f"record={str(path)!r}: an option of this pipeline cannot be written: {error}") from error
        try:
            self._file: IO[str] | None = path.open("w", encoding="utf-8")
            self._write(line)
        except OSError as error:
            raise PlanError(f"record={str(path)!r} cannot be written: {error}") from error

    def note(self, came: Came, frames: Tensor) -> None:
        """Take down a block and what it was made of. Ends the recording, with a warning, where that is impossible."""
        if self._file is None:
            return
        try:
            self.blocks += self._write(json.dumps(self._line(came, frames)))
        except OSError as error:
            self._give_up(str(error))

    def close(self) -> None:
        """No more comes. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _line(self, came: Came, frames: Tensor) -> dict[str, Any]:
        line: dict[str, Any] = {"block": came.produced.block, "epoch": came.epoch, "frames": digest(frames)}
        if came.epoch != self._epoch:
            self._epoch, line["adapt_sink"] = came.epoch, came.course.adapt_sink
        if came.begun.wishes:
            line["wishes"] = [as_words(wish) for wish in came.begun.wishes]
        if came.begun.inputs:
            line["heard"] = [_packed(x) for x in came.begun.inputs]
        if came.samples is not None:
            line["sound"] = _packed((came.samples.clamp(-1, 1) * 32767).round().to(torch.int16))
        return line

    def _write(self, line: str) -> bool:
        """Whether there was room for it."""
        assert self._file is not None
        self._size += len(line) + 1
        if self._size > self._limit:
            self._give_up(f"it has reached its limit of {self._limit} bytes")
            return False
        self._file.write(line + "\n")
        self._file.flush()
        return True

    def _give_up(self, why: str) -> None:
        log.warning("%s ends after %d blocks: %s; the stream goes on", self._path, self.blocks, why)
        self.close()


def digest(frames: Tensor) -> str:
    """Says whether two blocks of frames are the same bits."""
    return blake2b(frames.contiguous().numpy().data, digest_size=12).hexdigest()


def as_words(wish: Wish) -> dict[str, Any]:
    """A change as JSON has it."""
    values = {field.name: getattr(wish, field.name) for field in fields(wish)}
    words = {name: _packed(x) if isinstance(x, Tensor) else x for name, x in values.items()}
    return {"kind": type(wish).__name__, **words}


def as_wish(words: Mapping[str, Any]) -> Wish:
    """The change that `as_words` was given. Raises KeyError, TypeError, ValueError where they are of something else."""
    values = {name: unpacked(x) if isinstance(x, Mapping) else x for name, x in words.items() if name != "kind"}
    wish: Wish = WISHES[words["kind"]](**values)
    return wish


def _packed(x: Tensor) -> dict[str, Any]:
    raw = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    data = base64.b64encode(zlib.compress(raw)).decode()
    return {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."), "data": data}


def unpacked(packed: Mapping[str, Any]) -> Tensor:
    """The tensor that was packed. Raises KeyError, ValueError, zlib.error."""
    raw = bytearray(zlib.decompress(base64.b64decode(packed["data"])))
    dtype: torch.dtype = getattr(torch, packed["dtype"])
    return torch.frombuffer(raw, dtype=dtype).reshape(packed["shape"]) if raw else torch.empty(0, dtype=dtype)
