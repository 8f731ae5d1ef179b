"""Exceptions of ranks: recorded on the rank, raised again for the caller."""

import json
import pickle
import re
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from patchpar.errors import ExchangeError, LaunchError, PatchparError, WorkerError, WorkerOutOfMemory

# Errors of communication libraries when another rank has exited, does not answer, or has closed the connection. Such
# an exception is a consequence: its cause is on another rank.
TRANSPORT_CLASSES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
TRANSPORT_WORDS = ("gloo", "Gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})  # the latter is torch's, for all accelerators
ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"  # in torch's RuntimeError for host memory
MIXED_DTYPES = re.compile(r"same dtype|scalar type \w+ but found|type \(.*\) should be the same")
"""In torch's RuntimeErrors for operands of different dtypes."""
BROKEN_DEVICE = (
    *("an illegal memory access", "an illegal instruction", "device-side assert", "unspecified launch failure"),
    *("misaligned address", "on global/shared address space", "invalid program counter", "hardware stack error"),
    *("the launch timed out", "uncorrectable ECC error", "uncorrectable NVLink error"),
)
"""In RuntimeErrors after which all further work of the process on its device fails alike (CUDA Runtime API, section
Data types, cudaError: "the process must be terminated and relaunched"); HIP has the same texts."""
LEFT_CHANGES = "_patchpar_left_changes"
TOO_GENERAL = (Exception, RuntimeError)  # WorkerError is a RuntimeError already


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteError:
    """An exception of one rank, in a form that can always be pickled."""

    type_name: str
    text: str
    trace: str
    transport: bool
    exception: Exception | None  # for the caller: a builtin or one of patchpar.errors
    left_changes: bool = False  # see `say_changes_left`
    broken_device: bool = False  # see `has_broken_device`

    @classmethod
    def of_json(cls, data: bytes) -> "RemoteError":
        """Return the error of `as_json`, without its exception. Raises LaunchError for anything else."""
        try:
            name, message, trace, transport = json.loads(data)
        except (ValueError, TypeError) as error:
            raise LaunchError("another rank has reported its exception in a form that is not known here") from error
        return cls(type_name=str(name), text=str(message), trace=str(trace), transport=bool(transport), exception=None)

    def as_json(self) -> bytes:
        """Return it without its exception, for a reader that unpickles nothing."""
        return json.dumps([self.type_name, self.text, self.trace, self.transport]).encode()

    def headline(self) -> str:
        """Return type and message."""
        return f"{self.type_name}: {self.text}" if self.text else self.type_name

    def as_worker_error(self, who: str, rank: int | None) -> WorkerError:
        """Return an error with rank, type, message and traceback. `rank`: at fault; None if there are several."""
        kind = WorkerOutOfMemory if self.is_out_of_memory else WorkerError
        return kind(f"{who} raised {self.headline()}\n\n{self.trace}", rank=rank, cause=self.type_name)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the rank had too little memory, on its device or of the host."""
        return _is_out_of_memory(self.type_name, self.text)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that there is too little memory, on a device or of the host."""
    return _is_out_of_memory(type(error).__name__, str(error))


def _is_out_of_memory(type_name: str, text: str) -> bool:
    return type_name.rpartition(".")[2] in OUT_OF_MEMORY or ALLOCATOR in text


def is_of_mixed_dtypes(error: BaseException) -> bool:
    """Return whether an exception is torch's for operands of different dtypes."""
    return isinstance(error, RuntimeError) and MIXED_DTYPES.search(str(error)) is not None


def take_down(error: BaseException) -> RemoteError:
    """Return a RemoteError for a caught exception."""
    kind, part, is_transport = type(error), _engine_part(error.__traceback__), is_transport_error(error)
    lines = _without_source(error, part) if is_transport else traceback.format_exception(kind, error, part)
    return RemoteError(
        type_name=kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        text=str(error),
        trace="".join(lines).rstrip(),
        transport=is_transport,
        exception=_portable(error),
        left_changes=getattr(error, LEFT_CHANGES, False) is True,
        broken_device=has_broken_device(error),
    )


def has_broken_device(error: BaseException | None) -> bool:
    """Return whether an exception, or what it was raised for, says that the process can use its device no more."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(word in str(error) for word in BROKEN_DEVICE):
            return True
        error = error.__cause__
    return False


def say_changes_left(error: Exception) -> None:
    """Let the caller know that what raises this has changed a part of the rank's state, which no other call undoes."""
    with suppress(AttributeError, TypeError):  # of a class without attributes
        setattr(error, LEFT_CHANGES, True)


def _without_source(error: BaseException, trace: TracebackType | None) -> list[str]:
    """Return the lines of a traceback without those of source files, which take long to read.

    A failed exchange is a consequence, and the ranks that are left go on when all have said that they have one.
    """
    frames = [
        f'  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}\n'
        for frame, line in traceback.walk_tb(trace)
    ]
    lines, cause = traceback.format_exception_only(type(error), error), error.__cause__
    while cause is not None:
        lines += ["which was caused by\n", *traceback.format_exception_only(type(cause), cause)]
        cause = cause.__cause__
    return ["Traceback (most recent call last):\n", *frames, *lines]


def _engine_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of `patchpar.launch`, which come before the engine's."""
    whole = trace
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        trace = trace.tb_next
    return trace or whole


def is_transport_error(error: BaseException | None) -> bool:
    """Return whether this exception, or one of its causes, is a failed exchange between ranks."""
    while error is not None:
        if isinstance(error, ExchangeError) or type(error).__name__ in TRANSPORT_CLASSES:
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in TRANSPORT_WORDS):
            return True
        error = error.__cause__
    return False


def _portable(error: BaseException) -> Exception | None:
    """Return the exception itself if the caller has its class, else one of its nearest base class that it has.

    So `except ValueError` and `except OSError` work as with a plain diffusers pipeline. None if there is no such class,
    or if the exception cannot be pickled and restored.
    """
    try:
        candidate = error if type(error).__module__ in ("builtins", PatchparError.__module__) else _nearest(error)
        again = pickle.loads(pickle.dumps(candidate))
    except Exception:  # noqa: BLE001  an exception may hold anything, or have an unusual constructor
        return None
    faithful = isinstance(again, Exception) and str(again) == str(candidate)
    return again if faithful else None


def _nearest(error: BaseException) -> Exception | None:
    for kind in type(error).__mro__:
        if kind.__module__ == PatchparError.__module__ and issubclass(kind, PatchparError):
            return None if kind is PatchparError else kind(str(error))
        if kind.__module__ == "builtins" and issubclass(kind, Exception):
            return None if kind in TOO_GENERAL else kind(f"{type(error).__name__}: {error}")
    return None
