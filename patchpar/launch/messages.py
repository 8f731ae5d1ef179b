"""Encode objects as messages and back: pickles whose large buffers are in one anonymous block of shared memory.

How each type is pickled is in `pickling`. A decoded object is private to the receiver and writable.
Messages are unpickled, so they may only arrive through a channel that no untrusted process can write to.
"""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.pickling import INLINE_BYTES, BlockPickler
from patchpar.launch.shared_blocks import SharedBlock, SharedBlockWriter

SET, APPLY = "set", "apply"
"""Methods of engines that hold a pipeline: set one of its attributes, call one of its methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMessage:
    """An encoded object. `spans` are (offset, length) of its buffers in `block`, in bytes.

    A stream longer than INLINE_BYTES is in the block too, as the last span, and `stream` is empty.
    """

    stream: bytes
    spans: tuple[tuple[int, int], ...] = ()
    block: SharedBlock | None = None

    def close(self) -> None:
        """Close this process's descriptor of the block; receivers and mappings keep the block."""
        if self.block is not None:
            self.block.close()


def encode(value: object) -> EncodedMessage:
    """Encode any picklable object. The same message can be sent to many receivers.

    Raises pickle.PicklingError (or what the object's own pickling raises), and MemoryError if it does not fit.
    """
    writer = SharedBlockWriter()
    sink = io.BytesIO()
    try:
        pickler = BlockPickler(sink, writer)
        pickler.dump(value)
        stream = sink.getvalue()
        if len(stream) > INLINE_BYTES:
            pickler.spans.append(writer.append(memoryview(stream)))
            stream = b""
    except BaseException:
        writer.discard()
        raise
    return EncodedMessage(stream=stream, spans=tuple(pickler.spans), block=writer.finish())


def decode(message: EncodedMessage) -> Any:
    """Return the object, with its large buffers mapped, not copied. Raises what unpickling raises."""
    memory = message.block.map() if message.block is not None else memoryview(b"")
    return _loads(message.stream, [memory[start : start + length] for start, length in message.spans])


def pack(message: EncodedMessage) -> bytes:
    """Return a message as plain bytes, for transports that cannot pass descriptors. Closes the message."""
    memory = b"" if message.block is None else bytes(message.block.map())
    message.close()
    return pickle.dumps((message.stream, message.spans, memory))


def unpack(data: bytes) -> Any:
    """Return the object from the bytes of `pack`, writable and private."""
    stream, spans, memory = pickle.loads(data)
    view = memoryview(bytearray(memory))
    return _loads(stream, [view[start : start + length] for start, length in spans])


def _loads(stream: bytes, buffers: list[memoryview]) -> Any:
    return pickle.loads(stream or buffers.pop(), buffers=buffers)


def encode_call(method: str, args: Sequence[object], kwargs: dict[str, object], expected: float) -> EncodedMessage:
    """Encode a call. Raises PlanError that names the argument which cannot be sent."""
    try:
        return encode((method, tuple(args), kwargs, expected))
    except MemoryError:
        raise
    except Exception as error:
        for name, value in _arguments(method, args, kwargs):
            if reason := _reason_against(value):
                name, value = _narrowed(name, value)
                raise PlanError(
                    f"{name} (a {type(value).__name__}) cannot be sent to worker processes: {reason}"
                ) from error
        raise


def _arguments(method: str, args: Sequence[Any], kwargs: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the arguments of a call by name. A dict among them holds those of the call of a pipeline.

    SET and APPLY have the path of an attribute of the pipeline first, and then its value, or the arguments for it.
    """
    if method == SET:
        yield f"pipe.{args[0]}", args[1]
        return
    if method == APPLY:
        method, args = f"pipe.{args[0]}()", [*args[1], *args[2:]]
    for number, value in enumerate(args):
        if isinstance(value, dict) and all(isinstance(name, str) for name in value):
            yield from ((f"{method}: argument {name!r}", each) for name, each in value.items())
        else:
            yield f"{method}: argument {number + 1}", value
    yield from ((f"{method}: argument {name!r}", value) for name, value in kwargs.items())


def _narrowed(name: str, value: object) -> tuple[str, object]:
    """Return name and value of what cannot be sent in an argument: of an item, where it is a dict, list or tuple."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        if each is not value and _reason_against(each):
            return _narrowed(f"{name}[{key!r}]", each)
    return name, value


def _reason_against(value: object) -> str:
    """Return why `value` cannot be sent; empty if it can."""
    try:
        encode(value).close()
    except Exception as error:  # noqa: BLE001  any class may fail in its own way
        return str(error) or type(error).__name__
    return ""
