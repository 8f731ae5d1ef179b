"""Check that all ranks are called with the same arguments, where every rank has its own caller (torchrun).

Every rank sends a digest and a short description of each argument; the digests are compared. The digest covers:

    numbers, text, lists, mappings, dataclasses     their values
    tensors, arrays, images                         shape, dtype or mode, and every value
    paths, and text that is one here                the last part: machines may keep the same file in other folders
    schedulers and others with a `config`           class and config
    torch.Generator                                 nothing: all ranks take rank 0's state
    torch.device                                    the type: every rank has its own device
    functions, and everything else                  its name, or the name of its class
"""

import dataclasses
import enum
import hashlib
import json
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchpar.errors import ArgumentMismatch

PER_RANK = "per rank"
"""Metadata key of dataclass fields that may differ between ranks."""
LONGEST_TEXT = 60  # characters of a value in a message
PLAIN = (type(None), bool, int, float, complex, bytes)


def described(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return a description of a call for `compare`: JSON with digest and text of each argument."""
    found = {"method": [method, method]}
    for name, value in _named(args, kwargs):
        digest = hashlib.blake2b(digest_size=16)
        for part in _parts(value):
            digest.update(part)
        found[name] = [digest.hexdigest(), _in_words(value)]
    return json.dumps(found).encode()


def compare(calls: Sequence[bytes]) -> None:
    """Raise ArgumentMismatch if a call differs from that of rank 0. `calls` are in rank order."""
    first = json.loads(calls[0])
    for rank, data in enumerate(calls):
        call = json.loads(data)
        for name in [*first, *(name for name in call if name not in first)]:
            (ours, own), (theirs, other) = first.get(name, NOT_GIVEN), call.get(name, NOT_GIVEN)
            if ours == theirs:
                continue
            what = "the call" if name == "method" else f"{first['method'][1]}: argument {_displayed(name)}"
            raise ArgumentMismatch(
                f"{what} differs: {own} on rank 0, {other} on rank {rank}. Under torchrun every process makes the same "
                "call with the same arguments; broadcast values that only one process has before the call"
            )


NOT_GIVEN = ("", "not given")


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield arguments with unique names; items of mappings and fields of dataclasses one by one."""
    for index, value in enumerate(args):
        if isinstance(value, Mapping):
            yield from ((f"{index}:{name}", each) for name, each in value.items())
        elif _is_dataclass(value):
            yield from ((f"{index}:{name}", each) for name, each in _fields(value))
        else:
            yield f"{index}:", value
    yield from ((f"{len(args)}:{name}", value) for name, value in kwargs.items())


def _displayed(name: str) -> str:
    index, _, own = name.partition(":")
    return repr(own) if own else str(int(index) + 1)


def _in_words(value: Any) -> str:
    if isinstance(value, (*PLAIN, str)):
        text = repr(value)
        return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    return reprlib.repr(value) if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"


def _parts(value: Any) -> Iterator[bytes]:
    """Yield bytes that are equal exactly where the values are equal."""
    yield f"{type(value).__name__}(".encode()
    if isinstance(value, PLAIN):
        yield repr(value).encode()
    elif isinstance(value, (str, os.PathLike)):
        yield _without_folder(value).encode()
    elif isinstance(value, enum.Enum):
        yield str(value).encode()
    else:
        yield from _parts_within(value)
    yield b")"


def _parts_within(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield from (*_parts(str(name)), *_parts(value[name]))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(b"".join(_parts(each)) for each in value)
    elif _is_dataclass(value):
        for name, each in _fields(value):
            yield from (name.encode(), *_parts(each))
    else:
        yield from _other_parts(value)


def _other_parts(value: Any) -> Iterator[bytes]:
    """Yield bytes for types of libraries, without importing any of them."""
    kind = type(value)
    library = kind.__module__.partition(".")[0]
    config = getattr(value, "config", None)
    if library == "torch" and kind.__name__ in ("device", "dtype"):
        yield str(getattr(value, "type", value)).encode()
    elif library == "torch" and hasattr(value, "untyped_storage") and not value.is_meta:
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        yield from _bytes_of(value)
    elif library == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        yield f"{value.shape} {value.dtype}".encode() + value.tobytes()
    elif library == "PIL" and hasattr(value, "tobytes"):
        yield f"{value.size} {value.mode}".encode() + value.tobytes()
    elif isinstance(config, Mapping):
        yield from _parts(dict(config))
    else:
        yield str(getattr(value, "__qualname__", "")).encode()


def _bytes_of(tensor: Any) -> Iterator[bytes]:
    """Yield the values of a tensor of any shape; nothing for a sparse or quantized one."""
    import torch

    if tensor.layout is torch.strided and not tensor.is_quantized:
        yield tensor.detach().resolve_conj().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _without_folder(value: str | os.PathLike[str]) -> str:
    text = os.fspath(value)
    is_path = not isinstance(value, str) or os.path.exists(text)  # noqa: PTH110  which takes any text, however long
    return Path(text).name if is_path else text


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass that have to be equal on all ranks."""
    for field in dataclasses.fields(value):
        if not field.metadata.get(PER_RANK):
            yield field.name, getattr(value, field.name)
