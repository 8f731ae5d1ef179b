"""Reading a recording for replay: the header, and the inputs of each block."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.files import path_of
from patchpar.models.streaming.config import LEAST_FPS, LIMITS, MOST_FPS, MOST_STEPS, StreamConfig
from patchpar.plan.json_fields import flag, number, text, whole
from patchpar.plan.json_files import object_of
from patchpar.stream.audio_track import AudioSource
from patchpar.stream.delivery import Chunk
from patchpar.stream.events import Reference
from patchpar.stream.journal import FORMAT, LIMIT, JournalHeader, as_update, digest, kept_options, unpacked
from patchpar.stream.messages import LostStage, ReferenceUpdate, StreamRun, Update

LONGEST_PATH = 2**12
VERSION = re.compile(r"[\w.+-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """One block line. `heard`: audio tokens. `audio`: samples [N]. `lost`: states that are lost before it.

    `adapt_sink`: with the first block of an epoch in which all begins anew.
    """

    block: int
    epoch: int
    frames: str
    adapt_sink: bool | None = None
    updates: tuple[Update, ...] = ()
    heard: tuple[Tensor, ...] = ()
    audio: Tensor | None = None
    lost: tuple[LostStage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecording:
    """A recorded stream."""

    origin: JournalHeader
    blocks: tuple[RecordedBlock, ...]

    @classmethod
    def read(cls, path: str | Path) -> "StreamRecording":
        """Read a recording; an incomplete last line is left out. Raises PlanError."""
        path = path_of(path)
        head, *lines = _lines(path)
        origin = _origin(path, head)
        blocks = tuple(_block(path, number, line) for number, line in enumerate(lines, 2))
        if [block.block for block in blocks] != list(range(len(blocks))):
            raise PlanError(f"{path}: its blocks are not 0, 1, 2 and so on: a line is missing or was moved")
        if not blocks or blocks[0].adapt_sink is None:
            raise PlanError(f"{path} has no block: this stream ended before its first frame")
        return cls(origin=origin, blocks=blocks)

    def runs(self, run: StreamRun) -> tuple[StreamRun, ...]:
        """Return `run` once for each epoch in which all begins anew; it ends where the next begins."""
        return tuple(
            replace(
                run,
                first_block=block.block,
                adapt_sink=block.adapt_sink,
                lost=tuple(lost for each in self.blocks[block.block :] for lost in each.lost),
            )
            for block in self.blocks
            if block.adapt_sink is not None
        )

    def check_fits(self, size: tuple[int, int], heard: Sequence[int] | None) -> None:
        """Raise PlanError unless latents have this size and audio inputs the shape `heard`; None for no audio."""
        if self.origin.size != size:
            raise PlanError(
                f"it was recorded with latents of {self.origin.size}, and this model has {size}: use the model that "
                "it was recorded with"
            )
        image = (self.origin.config.height, self.origin.config.width, 3)
        for block in self.blocks:
            if [tuple(x.shape) for x in block.heard] != ([] if heard is None else [tuple(heard)]):
                raise PlanError(
                    f"block {block.block} has audio of another shape than this model takes: use the model that it was "
                    "recorded with"
                )
            if heard is not None and (block.audio is None or block.audio.dim() != 1):
                raise PlanError(f"block {block.block} has no audio samples: the recording is damaged")
            for update in block.updates:
                if isinstance(update, ReferenceUpdate) and (shape := tuple(update.image.shape)) != image:
                    raise PlanError(f"block {block.block} has a reference of {shape}, but the stream takes {image}")
                if isinstance(update, Reference):
                    self._check_sink(block.block, tuple(update.latents.shape))

    def _check_sink(self, block: int, shape: tuple[int, ...]) -> None:
        rows, columns = self.origin.size
        if len(shape) != 5 or (shape[0], *shape[2:]) != (1, 1, rows, columns):
            raise PlanError(
                f"block {block} has latents of {shape} as its first frame, but the stream has (1, C, 1, {rows}, "
                f"{columns}): the recording is damaged"
            )

    def is_as_it_was(self, chunk: Chunk) -> bool:
        """Whether the frames of `chunk` are bit-equal to the recorded ones."""
        return self.blocks[chunk.block].frames == digest(chunk.frames)

    def updates(self) -> Iterator[tuple[int, Update]]:
        """Yield every change with the block from which it holds."""
        return ((block.block, update) for block in self.blocks for update in block.updates)


class RecordedAudio(AudioSource):
    """The recorded audio, as an AudioSource."""

    def __init__(self, blocks: Sequence[RecordedBlock]) -> None:
        self._blocks = blocks

    def is_over(self, block: int) -> bool:
        return block >= len(self._blocks)

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """Return the recorded (audio tokens [1, F, n, C], samples [N]) of a block, see AudioSource."""
        (heard,), audio = self._blocks[block].heard, self._blocks[block].audio
        assert audio is not None, "`check_fits` requires samples with tokens"
        return heard, audio.float() / 32767


def _lines(path: Path) -> list[str]:
    """All complete lines. Raises PlanError."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > LIMIT:
                raise PlanError(f"{path} has more than {LIMIT} bytes, the limit of a recording")
            return file.read().decode("utf-8").split("\n")[:-1] or [""]
    except OSError as error:
        raise PlanError(f"{path} cannot be read as the recording of a stream: {error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{path} is no recording of a stream: byte {error.start} is not text. Give the file that --record wrote"
        ) from error


def _origin(path: Path, line: str) -> JournalHeader:
    where = f"{path}, line 1"
    try:
        facts = object_of(line, where)
        version = facts.pop("format")
    except (PlanError, KeyError) as error:
        raise PlanError(f"{path} is no recording of a stream: its first line is no header") from error
    if version != FORMAT:
        raise PlanError(
            f"{path} has format {version!r:.20}, and this patchpar reads format {FORMAT}: use the version that wrote it"
        )
    try:
        return JournalHeader(**{**facts, **_checked_origin(facts)})
    except (TypeError, KeyError, ValueError) as error:
        raise PlanError(f"{where}: the header is invalid: {error}") from error


def _checked_origin(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a JournalHeader. Raises PlanError, KeyError, TypeError, ValueError."""
    rows, columns = facts["size"]
    return {
        "model": text("model", facts["model"], LONGEST_PATH),
        "config": StreamConfig.of(_mapping("config", facts["config"])),
        "options": _options(_mapping("options", facts["options"])),
        "seed": whole("seed", facts["seed"], 0, 2**64 - 1),
        "fps": number("fps", facts["fps"], LEAST_FPS, MOST_FPS),
        "size": (whole("rows", rows, 1, LIMITS["height"]), whole("columns", columns, 1, LIMITS["width"])),
        "versions": _versions(_mapping("versions", facts["versions"])),
    }


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{name}={value!r:.80}: it must be an object")
    return value


def _options(options: Mapping[str, Any]) -> dict[str, str]:
    kept = kept_options(options)
    unknown = sorted(set(options) - set(kept))
    if unknown:
        raise PlanError(
            f"options {', '.join(map(repr, unknown))!s:.200} are not read from a recording: it may have torch_dtype "
            "and variant only"
        )
    return kept


def _versions(versions: Mapping[str, Any]) -> dict[str, str]:
    if not all(VERSION.fullmatch(name) and VERSION.fullmatch(str(number)) for name, number in versions.items()):
        raise PlanError(f"versions={versions!r:.80}: it must be package names with their versions")
    return {name: str(number) for name, number in versions.items()}


def _block(path: Path, number: int, line: str) -> RecordedBlock:
    where = f"{path}, line {number}"
    try:
        facts = object_of(line, where)
        return RecordedBlock(**{**facts, **_checked_block(facts)})
    except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
        raise PlanError(f"{where} is no block of a stream: {error}") from error


def _checked_block(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a RecordedBlock. Raises PlanError, KeyError, TypeError, ValueError."""
    adapt_sink = facts.get("adapt_sink")
    return {
        "block": whole("block", facts["block"], 0, 2**48),
        "epoch": whole("epoch", facts["epoch"], 0, 2**48),
        "frames": text("frames", facts["frames"], 64),
        "adapt_sink": None if adapt_sink is None else flag("adapt_sink", adapt_sink),
        "updates": tuple(as_update(words) for words in facts.get("updates", ())),
        "heard": tuple(unpacked(x) for x in facts.get("heard", ())),
        "audio": unpacked(facts["audio"]) if "audio" in facts else None,
        "lost": tuple(_lost(facts["block"], *each) for each in facts.get("lost", ())),
    }


def _lost(block: int, start: Any, stop: Any, decodes: Any, refills: Any) -> LostStage:
    return LostStage(
        block=block,
        start=whole("start", start, 0, MOST_STEPS),
        stop=whole("stop", stop, 0, MOST_STEPS),
        decodes=flag("decodes", decodes),
        refills=flag("refills", refills),
    )
