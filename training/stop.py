"""Ending a run between two steps."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(slots=True)
class StopSignal:
    """Turns SIGTERM and ctrl-C into a flag, so that a run ends between two steps with its state saved."""

    raised: bool = False

    def listen(self) -> StopSignal:
        """Start listening."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._raise)
        return self

    def _raise(self, *_: object) -> None:
        self.raised = True
