"""Recording of a stream for bit-equal replay: a JSON line per block, after a header line.

    {"format": 1, "model": ..., "config": {...}, "options": {...}, "seed": ..., ...}                      header
    {"block": 0, "epoch": 0, "frames": "9f...", "updates": [{"kind": "PromptUpdate", ...}], ...}           block

Of the options of from_pretrained it stores the dtype and the variant only, and `replay` reads no others: a journal
contains no token and no local path of an option. Only its owner can read the file.

A block line has the inputs of the block (conditions that hold from it on, audio tokens, audio samples in 16 bits),
states that were lost with a dead worker before it, and a hash of its frames. See docs/streaming.md.
"""

import base64
import binascii
import json
import logging
import math
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from patchpar.errors import PatchparError, PlanError
from patchpar.models.streaming.config import StreamConfig
from patchpar.plan.json_fields import whole
from patchpar.stream.delivery import Chunk
from patchpar.stream.events import Parameter, Reference
from patchpar.stream.messages import BeginBlock, LostStage, PromptUpdate, ReferenceUpdate, StreamRun, Update

FORMAT = 1
LIMIT = 2 * 2**30
DTYPES = ("float32", "float16", "bfloat16", "float64")
VARIANT = re.compile(r"\w[\w.-]{0,63}")
MOST_DIMS = 8
MOST_BYTES = 2**28
"""Limit of one tensor: a hundred times the largest reference that streams take."""
UPDATES: dict[str, type[Any]] = {kind.__name__: kind for kind in (PromptUpdate, ReferenceUpdate, Parameter, Reference)}
OPTIONAL = ("video", "masks")
"""Fields of changes that are a tensor, or None."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHeader:
    """Arguments with which a stream began. `options`: see `kept_options`. `size`: rows and columns of latents."""

    model: str
    config: StreamConfig
    options: Mapping[str, Any]
    seed: int
    fps: float
    size: tuple[int, int]
    versions: Mapping[str, str]


def kept_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of from_pretrained that a journal stores: torch_dtype, variant, as text. Raises PlanError."""
    dtype = options.get("torch_dtype", options.get("dtype"))
    found = {"torch_dtype": dtype, "variant": options.get("variant")}
    kept = {name: str(value).removeprefix("torch.") for name, value in found.items() if value is not None}
    if kept.get("torch_dtype", DTYPES[0]) not in DTYPES:
        raise PlanError(f"torch_dtype={kept['torch_dtype']!r:.80}: a recording takes {', '.join(DTYPES)}")
    if not VARIANT.fullmatch(kept.get("variant", "fp16")):
        raise PlanError(f"variant={kept['variant']!r:.80}: it must be a name such as fp16")
    return kept


class StreamJournal:
    """Records one stream in the file `path`. `error`: why it ends before the stream, or None.

    Raises PlanError if it cannot be written.
    """

    def __init__(self, path: Path, origin: JournalHeader, *, limit: int = LIMIT) -> None:
        self._path, self._limit, self._epoch = path, limit, -1
        self.error: PatchparError | None = None
        self.blocks = self._size = 0
        try:
            kept = kept_options(origin.options)
        except PlanError as error:
            raise PlanError(f"record={str(path)!r}: {error}") from error
        try:
            self._file: IO[str] | None = _private(path)
            self._write(json.dumps({"format": FORMAT, **asdict(replace(origin, options=kept))}))
        except OSError as error:
            raise PlanError(f"record={str(path)!r} cannot be written: {error}") from error
        left = sorted({*origin.options} - {*kept, "dtype"})
        if left:
            log.warning("%s does not store the options %s: replay runs without them", path, ", ".join(left))

    def note(self, chunk: Chunk, begun: BeginBlock, run: StreamRun, lost: Sequence[LostStage]) -> None:
        """Record the inputs of a block, which has `begun` so in `run`, what was lost before it, and its frames' hash.

        On failure, warn and end the recording.
        """
        if self._file is None:
            return
        try:
            self.blocks += self._write(json.dumps(self._line(chunk, begun, run, lost)))
        except OSError as error:
            self._give_up(str(error))

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # closing writes once more what a full disk has refused
                file.close()

    def _line(self, chunk: Chunk, begun: BeginBlock, run: StreamRun, lost: Sequence[LostStage]) -> dict[str, Any]:
        line: dict[str, Any] = {"block": chunk.block, "epoch": chunk.epoch, "frames": digest(chunk.frames)}
        if chunk.epoch != self._epoch:
            self._epoch = chunk.epoch
            if not run.continues:
                line["adapt_sink"] = run.adapt_sink
        if lost:
            line["lost"] = [[each.start, each.stop, each.decodes, each.refills] for each in lost]
        if begun.updates:
            line["updates"] = [as_words(update) for update in begun.updates]
        if begun.inputs:
            line["heard"] = [_packed(x) for x in begun.inputs]
        if chunk.audio is not None:
            line["audio"] = _packed((chunk.audio.clamp(-1, 1) * 32767).round().to(torch.int16))
        return line

    def _write(self, line: str) -> bool:
        """Write a line; returns whether it was within the limit."""
        assert self._file is not None
        self._size += len(line) + 1
        if self._size > self._limit:
            self._give_up(f"it has reached its limit of {self._limit} bytes")
            return False
        self._file.write(line + "\n")
        self._file.flush()
        return True

    def _give_up(self, why: str) -> None:
        self.error = PatchparError(f"{self._path} ends after {self.blocks} blocks: {why}")
        log.warning("%s; the stream continues", self.error)
        self.close()


def digest(frames: Tensor) -> str:
    """Return a hash (BLAKE2b) of frames [F, H, W, 3], equal for bit-equal frames."""
    return blake2b(frames.contiguous().numpy().data, digest_size=12).hexdigest()


def _private(path: Path) -> IO[str]:
    """Open `path` for writing with mode 0600, also if it exists."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)
    return os.fdopen(file, "w", encoding="utf-8")


def as_words(update: Update) -> dict[str, Any]:
    """Return a change as a JSON object."""
    values = {field.name: getattr(update, field.name) for field in fields(update)}
    words = {name: _packed(x) if isinstance(x, Tensor) else x for name, x in values.items()}
    return {"kind": type(update).__name__, **words}


def as_update(words: Any) -> Update:
    """Restore a change from the JSON object of `as_words`. Raises PlanError, KeyError, TypeError, ValueError."""
    kind = UPDATES[words["kind"]]
    values = {name: unpacked(x) if isinstance(x, Mapping) else x for name, x in words.items() if name != "kind"}
    for name, value in values.items():
        is_tensor = isinstance(value, Tensor) or (name in OPTIONAL and value is None)
        if not is_tensor and name in ("image", "latents", *OPTIONAL):
            raise PlanError(f"{name}={value!r:.80}: it must be a tensor")
    return kind(**values)  # which checks the rest


def _packed(x: Tensor) -> dict[str, Any]:
    raw = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    data = base64.b64encode(zlib.compress(raw)).decode()
    return {"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch."), "data": data}


def unpacked(packed: Any) -> Tensor:
    """Restore a tensor of at most MOST_DIMS dims that has values. Raises PlanError, KeyError, TypeError, ValueError."""
    dtype = _DTYPES[packed["dtype"]]
    shape = [whole("a side of a tensor", side, 0, MOST_BYTES) for side in packed["shape"]]
    size = math.prod(shape) * dtype.itemsize
    if size > MOST_BYTES or len(shape) > MOST_DIMS:
        raise PlanError(
            f"a tensor of {size} bytes in {len(shape)} dims: one of a recording has at most {MOST_BYTES} in {MOST_DIMS}"
        )
    try:
        raw = zlib.decompressobj().decompress(base64.b64decode(packed["data"]), size + 1)
    except (binascii.Error, zlib.error) as error:
        raise PlanError(f"a tensor whose bytes cannot be read: {error}") from error
    if len(raw) != size:
        raise PlanError(f"a tensor whose shape needs {size} bytes has more or fewer")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


_DTYPES = {name: getattr(torch, name) for name in (*DTYPES, "uint8", "int16", "int32", "int64")}
"""Dtypes of tensors in a journal."""
