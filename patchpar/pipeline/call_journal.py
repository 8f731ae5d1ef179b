"""What the caller keeps of a job, so that it can go on elsewhere: predictions, and what callbacks have answered.

Does not import torch, so that a caller need not.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable

from patchpar.pipeline.messages import RecordedPrediction, RecordingStopped

log = logging.getLogger(__name__)


class CallJournal:
    """Denoiser calls of one job, from the first one on, as its ranks have recorded them.

    The job's thread adds them while another one may read them, to write the job down as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_group: defaultdict[int, dict[int, RecordedPrediction]] = defaultdict(dict)
        self._groups = 1
        self.why_not = ""
        """Why the job could only go on from its beginning; empty if it can from where it is."""

    def take_up(self, calls: Iterable[RecordedPrediction], groups: int) -> None:
        """Begin with calls of an earlier job, which had so many prompt groups."""
        self._groups = groups
        for call in calls:
            self.add(call)

    def begin(self, groups: int) -> tuple[RecordedPrediction, ...]:
        """Begin to make the call with so many prompt groups; return what it need not compute again."""
        with self._lock:
            if groups != self._groups and self._by_group:
                self.clear(f"its prompts were in {self._groups} groups, and are in {groups} now")
            self._groups = groups
            return self.calls

    def add(self, event: RecordedPrediction | RecordingStopped) -> None:
        """Keep what a rank has sent."""
        if isinstance(event, RecordedPrediction):
            with self._lock:
                self._by_group[event.group][event.number] = event
        elif event.loses:
            self.clear(event.reason)
        else:
            log.info("a job is no longer recorded: %s", event.reason)

    def clear(self, reason: str) -> None:
        """Forget all calls: the job starts from its beginning."""
        with self._lock:
            if self._by_group:
                log.warning("a job starts from its beginning: %s", reason)
            self._by_group.clear()
            self.why_not = reason

    @property
    def groups(self) -> int:
        """How many groups its prompts are in."""
        return self._groups

    @property
    def length(self) -> int:
        """Number of denoiser calls that need not be made again."""
        with self._lock:
            return min(map(self._known, range(self._groups)))

    @property
    def calls(self) -> tuple[RecordedPrediction, ...]:
        """Those calls, of each prompt group as many."""
        with self._lock:
            count = self.length
            return tuple(self._by_group[group][number] for group in range(self._groups) for number in range(count))

    def _known(self, group: int) -> int:
        known, count = self._by_group.get(group, {}), 0
        while count in known:
            count += 1
        return count
