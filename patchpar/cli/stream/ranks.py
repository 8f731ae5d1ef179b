"""The ranks of a stream's command: a signal ends them at once, whatever they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from patchpar.launch.shutdown import abandon_computation, ended_at_once, exit_code

if TYPE_CHECKING:
    from types import TracebackType

    from patchpar.stream.worker_group import HeldRanks

P = TypeVar("P", bound="HeldRanks[Any, Any]")


class StreamRanks:
    """A streaming pipeline from loading to the end of the `with` block, and whether a signal has ended its stream.

    After a signal a step that computes in this process is not waited for; exits if that was before the first frame.
    """

    def __init__(self) -> None:
        self._pipe: HeldRanks[Any, Any] | None = None
        self.has_signal = False

    def load(self, loading: Callable[[], P]) -> P:
        """Return the pipeline that `loading` returns. A signal ends the process also if this takes long."""
        with ended_at_once():
            self._pipe = pipe = loading()
        return pipe

    @property
    def is_computing(self) -> bool:
        """Whether a step in this process goes on after the end."""
        return self._pipe is not None and self._pipe.is_computing

    def __enter__(self) -> StreamRanks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        is_signal = isinstance(error, (KeyboardInterrupt, SystemExit))
        if self._pipe is not None:
            self._pipe.close(wait=not (is_signal or self.has_signal))
        if error is not None and is_signal and self.is_computing:
            abandon_computation(exit_code(error))
