"""Context managers for streams: sessions, and pipelines with their ranks."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from patchpar.errors import PlanError

SOON = 2.0
"""Seconds that a cancelled stream has to free its ranks before they are ended."""
Self = TypeVar("Self", bound="Closing")
R = TypeVar("R", bound="Closable")
S = TypeVar("S", bound="OneStream")


class Closing:
    """Closed at the end of its `with` block, plain or async."""

    def close(self) -> None:
        """Free all resources. Idempotent."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


class Closable(Protocol):
    """Ranks of a pipeline."""

    def close(self) -> None:
        """End the ranks."""


class OneStream(Closable, Protocol):
    """The session of a pipeline."""

    @property
    def is_over(self) -> bool:
        """Whether no further output comes."""

    def cancel(self) -> None:
        """End now, without further output."""

    def is_free_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the ranks to be free; returns whether they are."""


class HeldRanks(Closing, Generic[R, S]):
    """Ranks with at most one stream on them."""

    def __init__(self, ranks: R) -> None:
        self._ranks: R | None = ranks
        self._session: S | None = None

    def _free_ranks(self) -> R:
        """The ranks, for another stream. Raises PlanError if a stream is running on them, or they are closed."""
        if self._ranks is None:
            raise PlanError("this pipeline is closed; make a new one")
        if self._session is not None and not self._session.is_over:
            raise PlanError("a stream is running on these ranks: close it first, or make another pipeline")
        if self._session is not None:
            self._session.close()
        return self._ranks

    def close(self) -> None:
        """End the stream and the workers, also in the middle of a step. Idempotent. Raises PlanError."""
        ranks, self._ranks = self._ranks, None
        try:
            if self._session is not None:
                self._session.cancel()
                self._session.is_free_within(SOON)
        finally:
            if ranks is not None:
                ranks.close()
        if self._session is not None:
            self._session.close()
