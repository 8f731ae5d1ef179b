"""What a journal holds, read again: how the stream was begun, and the block by block of which it can be made again."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from patchpar.errors import PlanError
from patchpar.stream.config import StreamConfig
from patchpar.stream.delivery import Chunk
from patchpar.stream.journal import FORMAT, Origin, as_wish, digest, unpacked
from patchpar.stream.talk import Course, Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """One line. `adapt_sink` where an epoch begins; `heard` and `sound` of a model that hears."""

    block: int
    epoch: int
    frames: str
    adapt_sink: bool | None = None
    wishes: tuple[Wish, ...] = ()
    heard: tuple[Tensor, ...] = ()
    sound: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A stream that was taken down."""

    origin: Origin
    blocks: tuple[RecordedBlock, ...]

    @classmethod
    def read(cls, path: str | Path) -> "Recording":
        """Read a journal; a last line that is not whole is left out. Raises PlanError."""
        path = Path(path)
        try:
            head, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} cannot be read as the journal of a stream: {error}") from error
        origin = _origin(path, head)
        blocks = tuple(_block(path, number, line) for number, line in enumerate(lines, 2))
        if [block.block for block in blocks] != list(range(len(blocks))):
            raise PlanError(f"{path}: its blocks are not 0, 1, 2 and so on: a line is missing or was moved")
        if not blocks or blocks[0].adapt_sink is None:
            raise PlanError(f"{path} has no block: nothing had come out of this stream")
        return cls(origin=origin, blocks=blocks)

    def courses(self, ranks: int) -> tuple[Course, ...]:
        """One for each epoch."""
        rows, columns = self.origin.size
        return tuple(
            Course(
                ranks=ranks,
                seed=self.origin.seed,
                rows=rows,
                columns=columns,
                first_block=block.block,
                adapt_sink=block.adapt_sink,
            )
            for block in self.blocks
            if block.adapt_sink is not None
        )

    def is_as_it_was(self, chunk: Chunk) -> bool:
        """Whether these are the very frames that were taken down."""
        return self.blocks[chunk.block].frames == digest(chunk.frames)

    def wishes(self) -> Iterator[tuple[int, Wish]]:
        """Every change with the block from which it holds."""
        return ((block.block, wish) for block in self.blocks for wish in block.wishes)


class RecordedSound:
    """The sound of a recording, see driver.Source."""

    def __init__(self, blocks: Sequence[RecordedBlock]) -> None:
        self._blocks = blocks

    def is_here(self, block: int) -> bool:
        """All of it is."""
        return True

    def is_over(self, block: int) -> bool:
        """See Source."""
        return block >= len(self._blocks)

    def take(self, block: int) -> tuple[Tensor, Tensor]:
        """See Source."""
        (heard,), sound = self._blocks[block].heard, self._blocks[block].sound
        assert sound is not None, "who hears is heard"
        return heard, sound.float() / 32767


def _origin(path: Path, line: str) -> Origin:
    try:
        facts: dict[str, Any] = json.loads(line)
        version = facts.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} is no journal of a stream: its first line does not say how one was begun") from error
    if version != FORMAT:
        raise PlanError(f"{path} is of format {version}, and this patchpar reads format {FORMAT}: use another version")
    try:
        config = StreamConfig.of(facts.pop("config"))
        return Origin(**{**facts, "config": config, "size": tuple(facts["size"])})
    except (TypeError, KeyError) as error:
        raise PlanError(f"{path}, line 1: it does not say how a stream was begun: {error}") from error


def _block(path: Path, number: int, line: str) -> RecordedBlock:
    try:
        facts: Mapping[str, Any] = json.loads(line)
        values = {
            **facts,
            "wishes": tuple(as_wish(words) for words in facts.get("wishes", ())),
            "heard": tuple(unpacked(x) for x in facts.get("heard", ())),
            "sound": unpacked(facts["sound"]) if "sound" in facts else None,
        }
        return RecordedBlock(**values)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, zlib.error) as error:
        raise PlanError(f"{path}, line {number} is no block of a stream: {error}") from error
