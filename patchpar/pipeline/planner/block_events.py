"""What a block has noted when it ran, to be noted again for another one that would note the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from patchpar.comm.pytree import map_leaves
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import META
from patchpar.pipeline.planner.block_forms import attributes_of, form_after, versions_of
from patchpar.pipeline.planner.call_log import (
    CallLog,
    Event,
    LoggedAttention,
    LoggedBytes,
    LoggedTape,
    MetaForm,
    Noted,
)
from patchpar.pipeline.planner.tape_recorder import Begun, Expected, TapeRecorder
from patchpar.plan.replay.tape import Operator

PATH = "\0block"
"""Stands for the path of a block."""
IN_A_BLOCK = ("send", "begun", "expect", "wait", "leave", "block", "work")
"""What may be noted again for another block."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a list, and its forward. `form`: see `block_form`."""

    path: str
    module: nn.Module
    form: tuple[Any, ...]
    forward: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Given:
    """A result that is the argument of this number, among tensors."""

    number: int


@dataclass(frozen=True, slots=True)
class Made:
    """A new result, of any shape, `offset` elements from the beginning of new storage number `storage`."""

    form: MetaForm
    offset: int
    storage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvents:
    """What a block has noted, with PATH for its own path, and its `result`, whose new storages have so many bytes."""

    events: tuple[Event, ...]
    result: Any
    storages: tuple[int, ...]


@dataclass(slots=True)
class Kind:
    """What blocks of one kind have noted. `is_sure`: two of them the same; `is_odd`: no other may be left out."""

    found: BlockEvents | None = None
    is_sure: bool = False
    is_odd: bool = False


class NotedBlocks:
    """Watches blocks that run, and notes on a tape and memory what others would. `by_value`: see `argument_form`."""

    by_value: ClassVar[bool] = False

    def __init__(self, log: CallLog, tape: LoggedTape, memory: LoggedBytes) -> None:
        self._log, self._tape, self._memory = log, tape, memory

    def _as_kind(
        self, kind: Kind, block: Block, args: Any, kwargs: Any, form: Any, tensors: "Sequence[ref[Tensor]]"
    ) -> Any:
        """Return the result of a block of a kind, which runs only if it is not known what it would note."""
        if kind.is_odd:
            return block.forward(*args, **kwargs)
        if kind.is_sure and kind.found is not None:
            return self._again(kind.found, block.path, tensors)
        result, noted = self._watched(block, args, kwargs, form, tensors)
        kind.is_sure, kind.is_odd = kind.found == noted, noted is None
        kind.found = noted
        return result

    def _watched(
        self, block: Block, args: Any, kwargs: Any, form: Any, tensors: "Sequence[ref[Tensor]]"
    ) -> tuple[Any, BlockEvents | None]:
        """Run a block; return its result and what it has noted, None if that does not say all that it has done."""
        before, attributes = self._memory.storages, attributes_of(block.module)
        versions = versions_of(tensors)
        outside, self._log.events = self._log.events, []
        try:
            result = block.forward(*args, **kwargs)
        finally:
            events, self._log.events = self._log.events, outside
            outside.extend(events)
        after = self._memory.storages
        is_same = attributes == attributes_of(block.module) and versions == versions_of(tensors)
        if (
            before - after
            or not is_same
            or not _is_closed(events)
            or form_after(args, kwargs, by_value=self.by_value) != form
        ):
            return result, None
        known = {id(each()): Given(number) for number, each in enumerate(tensors)}  # all are there: nothing has changed
        storages: dict[int, tuple[int, int]] = {}
        try:
            results = map_leaves(partial(_result_form, known, after - before, storages), result)
        except TypeError:
            return result, None
        if storages.keys() != after - before:
            return result, None
        noted = tuple(_Renaming(block.path, PATH).of(events))
        return result, BlockEvents(events=noted, result=results, storages=tuple(size for _, size in storages.values()))

    def _again(self, found: BlockEvents, path: str, tensors: "Sequence[ref[Tensor]]") -> Any:
        """Note for the block at `path` what one of its kind has noted, and return such a result."""
        self._log.events.extend(_NotedFor(path, self._tape, self._memory).note(found.events))
        for num_bytes in found.storages:
            self._memory.change(-num_bytes)  # the result itself counts them
        buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=META) for num_bytes in found.storages]

        def made(leaf: Any) -> Any:
            if isinstance(leaf, Given):
                return tensors[leaf.number]()
            if not isinstance(leaf, Made):
                return leaf
            form = leaf.form
            return buffers[leaf.storage].view(form.dtype).as_strided(form.shape, form.strides, leaf.offset)

        return map_leaves(made, found.result)


def _is_closed(events: Sequence[Event]) -> bool:
    """Whether events wait for what they have announced only, and are none of a step or a phase."""
    announced: set[Any] = set()
    for event in _flat(events):
        if event.name not in IN_A_BLOCK:
            return False
        if any(isinstance(each, (Expected, Begun)) and each not in announced for each in event.args):
            return False
        if event.result is not None:
            announced.add(event.result)
    return True


def _flat(events: Sequence[Event]) -> Iterator[Noted]:
    for event in events:
        if isinstance(event, LoggedAttention):
            yield from _flat(event.events)
        elif isinstance(event, Noted):
            yield event


def _result_form(known: Mapping[int, Given], new: frozenset[int], storages: dict[int, tuple[int, int]], x: Any) -> Any:
    """Return what a leaf of a result is. Raises TypeError for one that cannot be made again."""
    if id(x) in known:
        return known[id(x)]
    if type(x) is Tensor and x.is_meta and id(x.untyped_storage()) in new:
        storage = x.untyped_storage()
        number, _ = storages.setdefault(id(storage), (len(storages), storage.nbytes()))
        return Made(MetaForm.of(x), int(x.storage_offset()), number)
    if x is None or type(x) in (bool, int, float, str):
        return x
    raise TypeError(f"a {type(x).__name__}, which is neither an argument nor a new tensor")


@dataclass(slots=True)
class _Renaming:
    """Events of a block with another path, and messages and operations by their number in it."""

    path: str
    to: str
    _numbers: dict[Any, int] = field(default_factory=dict)

    def of(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, LoggedAttention):
                inside = tuple(self.of(event.events))
                yield replace(event, where=renamed(event.where, self.path, self.to), events=inside)
            elif isinstance(event, Noted):
                args = tuple(map(self._argument, event.args))
                number = None
                if event.result is not None:
                    number = self._numbers[event.result] = len(self._numbers)
                yield replace(event, args=args, result=number)
            else:
                yield event

    def _argument(self, value: Any) -> Any:
        if isinstance(value, (Expected, Begun)):
            return _Number(self._numbers[value])
        return renamed(value, self.path, self.to) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class _Number:
    """A message or operation of a block, by the number of the event that it is the result of."""

    number: int


def renamed(text: str, path: str, to: str) -> str:
    """Return an exchange point, or a part, of the block at `path` as that of another one.

    The name of its component may stand before.
    """
    before, found, rest = text.partition(path)
    is_path = found and before[-1:] in ("", ".") and not rest[:1].isalnum()
    return f"{before}{to}{rest}" if is_path else text


class _NotedFor:
    """Notes events of a kind of blocks for the one at `path`, as if it had run."""

    def __init__(self, path: str, tape: TapeRecorder, memory: LiveBytes) -> None:
        self._path, self._tape, self._memory = path, tape, memory
        self._known: dict[int, Any] = {}

    def note(self, events: Sequence[Event]) -> Iterator[Event]:
        """Note events on the tape and the memory, and yield them for the log."""
        for event in events:
            kind = type(event)
            if kind is Operator:
                TapeRecorder.operator(self._tape, event)  # type: ignore[arg-type]  # isinstance takes longer
                yield event
            elif kind is int:
                LiveBytes.change(self._memory, event)  # type: ignore[arg-type]
                yield event
            elif isinstance(event, LoggedAttention):
                where = renamed(event.where, PATH, self._path)
                yield replace(event, where=where, events=tuple(self.note(event.events)))
            elif isinstance(event, Noted):
                yield self._again(event)

    def _again(self, event: Noted) -> Noted:
        target = self._tape if event.of is TapeRecorder else self._memory
        args = tuple(map(self._argument, event.args))
        found = getattr(event.of, event.name)(target, *args, **event.options)  # past the log
        if event.result is not None:
            self._known[event.result] = found
        return replace(event, args=args, result=found)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, _Number):
            return self._known[value.number]
        return renamed(value, PATH, self._path) if isinstance(value, str) else value
