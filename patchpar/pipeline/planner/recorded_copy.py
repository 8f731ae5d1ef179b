"""Copies of weights from the host's memory on the tape of a rank (`weights=hosted`)."""

from patchpar.pipeline.planner.tape_recorder import TapeRecorder


class RecordedCopy:
    """A copy that begins now. Its first wait is noted; `at_once`: here."""

    def __init__(self, tape: TapeRecorder, rank: int, num_bytes: int, where: str, *, at_once: bool) -> None:
        self._tape, self._is_over = tape, False
        self._expected = tape.copy(rank, num_bytes, where)
        if at_once:
            self.wait()

    def wait(self) -> None:
        """Note that the copy is needed now."""
        if not self._is_over:
            self._tape.wait(self._expected)
        self._is_over = True
