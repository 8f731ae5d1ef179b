"""Exceptions that come from afar: taken down on a rank, put together again for the caller."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from patchpar.errors import ExchangeError, WorkerError

# What the libraries under an exchange say when another rank has gone, is silent, or has closed the connection. Such
# an exception is a consequence: the cause is on another rank.
TRANSPORT_CLASSES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
TRANSPORT_WORDS = ("gloo", "Gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
TOO_GENERAL = (Exception, RuntimeError)  # a WorkerError is one of these already


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteError:
    """An exception of one rank, in a form that always travels."""

    type_name: str
    text: str
    trace: str
    transport: bool
    exception: Exception | None  # as the caller may get it: a builtin or one of patchpar's own

    def headline(self) -> str:
        """Type and message, on one line or more."""
        return f"{self.type_name}: {self.text}" if self.text else self.type_name

    def as_worker_error(self, who: str, rank: int | None) -> WorkerError:
        """For a caller: names the rank, the type and the message, and ends with the rank's own traceback.

        `rank`: the one at fault, if it is one alone.
        """
        return WorkerError(f"{who} raised {self.headline()}\n\n{self.trace}", rank=rank)


def take_down(error: BaseException) -> RemoteError:
    """Make a failure of an exception that has been caught."""
    kind = type(error)
    return RemoteError(
        type_name=kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        text=str(error),
        trace="".join(traceback.format_exception(kind, error, _engine_part(error.__traceback__))).rstrip(),
        transport=is_transport_error(error),
        exception=_portable(error),
    )


def _engine_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this package's launching, which run before the engine's."""
    whole = trace
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        trace = trace.tb_next
    return trace or whole


def is_transport_error(error: BaseException | None) -> bool:
    """Whether an exchange between ranks failed: here, or in what led to this exception."""
    while error is not None:
        if isinstance(error, ExchangeError) or type(error).__name__ in TRANSPORT_CLASSES:
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in TRANSPORT_WORDS):
            return True
        error = error.__cause__
    return False


def _portable(error: BaseException) -> Exception | None:
    """The exception itself if its class is known everywhere, else one of its nearest builtin class.

    So `except ValueError` and `except OSError` work as they do around a plain diffusers pipeline. None if there is no
    such class, or if the exception does not survive the journey.
    """
    try:
        candidate = error if type(error).__module__ in ("builtins", "patchpar.errors") else _nearest_builtin(error)
        again = pickle.loads(pickle.dumps(candidate))
    except Exception:  # noqa: BLE001  an exception may hold anything, or have a constructor of its own
        return None
    faithful = isinstance(again, Exception) and str(again) == str(candidate)
    return again if faithful else None


def _nearest_builtin(error: BaseException) -> Exception | None:
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins" and issubclass(kind, Exception):
            return None if kind in TOO_GENERAL else kind(f"{type(error).__name__}: {error}")
    return None
