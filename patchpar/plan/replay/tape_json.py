"""Recorded tapes as text: each different entry once, and the order of all. Most operators come again in every block."""

import base64
import json
import zlib
from typing import Any

from patchpar.plan.replay.tape import Boundary, Leave, Operator, Receive, Send, Tape, TapeEntry, Wait
from patchpar.plan.scalars import is_number

LONGEST = 2**28
"""Bytes of a tape's JSON. A text that unpacks to more was not written here."""

LETTERS = {Operator: "o", Send: "s", Receive: "r", Leave: "l", Wait: "w", Boundary: "b"}
"""Kinds of entries; each is written as its letter and its fields in their order."""


def to_text(tape: Tape) -> str:
    """Return a recorded tape as text. Raises TypeError for a kernel, which has a price and no operator."""
    positions: dict[TapeEntry, int] = {}
    known: dict[int, int] = {}  # by id: most entries are an object that is there already
    order = []
    for entry in tape:
        position = known.get(id(entry))
        if position is None:
            position = known[id(entry)] = positions.setdefault(entry, len(positions))
        order.append(position)
    written = json.dumps([[_fields(entry) for entry in positions], order], separators=(",", ":"))
    return base64.b64encode(zlib.compress(written.encode(), 1)).decode()


def from_text(text: str) -> Tape:
    """Return the tape of a text. Raises TypeError, ValueError or LookupError for one that was not written by it."""
    try:
        unpacker = zlib.decompressobj()
        written = unpacker.decompress(base64.b64decode(text, validate=True), LONGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    entries, order = json.loads(written)
    different = [_entry(*fields) for fields in entries]
    return tuple([different[position] for position in order])


def _fields(entry: TapeEntry) -> list[Any]:
    letter = LETTERS.get(type(entry))
    if letter is None:
        raise TypeError(f"{entry} is no entry of a recorded tape")
    return [letter, *entry]


def _entry(kind: str, *fields: Any) -> TapeEntry:
    if kind == "o":
        op, dtype, flops, op_bytes, dims = fields
        _check((flops, op_bytes, *dims), (op, dtype))
        return Operator(op, dtype, flops, op_bytes, tuple(dims))
    if kind == "s":
        number, peers, name, num_bytes, where, parts, bulk, operation = fields
        kinds, part_bytes = zip(*parts, strict=True) if parts else ((), ())
        _check((number, *peers, num_bytes, *part_bytes, operation), (name, where, *kinds), (bulk,))
        return Send(number, tuple(peers), name, num_bytes, where, tuple(map(tuple, parts)), bulk, operation)
    if kind == "r":
        number, sender, where = fields
        _check((number, sender), (where,))
        return Receive(number, sender, where)
    if kind == "l":
        operation, where, name = fields
        _check((operation,), (where, name))
        return Leave(operation, where, name)
    if kind == "w":
        number, sender, num_bytes, where, name = fields
        _check((number, sender, num_bytes), (where, name))
        return Wait(number, sender, num_bytes, where, name)
    if kind == "b":
        name, is_step = fields
        _check((), (name,), (is_step,))
        return Boundary(name, is_step)
    raise ValueError(f"{kind!r} is no kind of entry")


def _check(numbers: tuple[object, ...], texts: tuple[object, ...], flags: tuple[object, ...] = ()) -> None:
    """Raise TypeError where a field of an entry is of another type: a replay would fail long after it was read."""
    if not all(is_number(each) for each in numbers) or not all(isinstance(each, str) for each in texts):
        raise TypeError(f"{numbers!r:.80} and {texts!r:.80} are not the numbers and texts of an entry")
    if not all(isinstance(each, bool) for each in flags):
        raise TypeError(f"{flags!r:.80} are not the flags of an entry")
