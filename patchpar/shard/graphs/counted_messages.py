"""Messages of a captured step, which every replay sends again, and which are counted then."""

from collections import Counter

from patchpar.comm.traffic import CommStats


class CountedMessages:
    """Bytes and rounds that `traffic` counts from now on."""

    def __init__(self, traffic: CommStats) -> None:
        self._traffic, self._before = traffic, self._copy(traffic)
        self._more: list[Counter[str]] = []

    @staticmethod
    def _copy(traffic: CommStats) -> list[Counter[str]]:
        return [each.copy() for each in _counters(traffic)]

    def taken_off(self) -> "CountedMessages":
        """Set the counts back to what they were, and hold the difference."""
        for counted, before in zip(_counters(self._traffic), self._before, strict=True):
            self._more.append(counted - before)
            counted.subtract(self._more[-1])
        return self

    def add_to(self, traffic: CommStats) -> None:
        """Count once more what is held."""
        for counted, more in zip(_counters(traffic), self._more, strict=True):
            counted.update(more)


def _counters(traffic: CommStats) -> tuple[Counter[str], ...]:
    return traffic.bytes_sent, traffic.bytes_received, traffic.rounds
