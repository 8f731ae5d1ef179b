"""Bytes of the tensors that are alive: every storage from the operator that makes it until it is freed."""

import weakref

from torch import Tensor


class LiveBytes:
    """Counts storages made since the beginning. `alive`: now; `peaks`: the most in each phase, by its name.

    `working`: the same with the buffers of kernels that run meanwhile.
    """

    def __init__(self, phase: str) -> None:
        self.alive = 0
        self.peaks: dict[str, int] = {phase: 0}
        self.working: dict[str, int] = {phase: 0}
        self.phase = phase
        self._known: set[int] = set()

    def begin(self, phase: str) -> None:
        """Forget all peaks, and begin a phase."""
        self.peaks.clear()
        self.working.clear()
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """Begin a phase, or go on with one; what is alive counts in it."""
        self.phase = phase
        self._note_peak()

    def merge(self, phase: str, into: str) -> None:
        """Let what was counted in `phase` be of another one."""
        for found in (self.peaks, self.working):
            found[into] = max(found.get(into, 0), found.pop(phase, 0))

    def work(self, num_bytes: int) -> None:
        """Count so many bytes that a kernel takes while it runs, and gives back."""
        self.working[self.phase] = max(self.working.get(self.phase, 0), self.alive + num_bytes)

    def see(self, x: Tensor) -> None:
        """Count the storage of `x`, of any shape, if it is new."""
        storage = x.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        self._known.add(key)
        self.change(storage.nbytes())
        weakref.finalize(storage, self._freed, key, storage.nbytes())

    def counts(self, storage: int) -> bool:
        """Whether the storage with this id is counted here."""
        return storage in self._known

    def _note_peak(self) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.alive)
        self.work(0)

    def _freed(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.change(-num_bytes)

    def change(self, num_bytes: int) -> None:
        """Count so many bytes more; below 0, so many less."""
        self.alive += num_bytes
        if num_bytes > 0 and self.alive > self.peaks.get(self.phase, -1):  # else no more in `working` either
            self._note_peak()

    def change_all(self, num_bytes: int, most: int | None) -> None:
        """Count several changes: so many bytes in all, and at `most` after one of more bytes; None: there was none."""
        after = self.alive + num_bytes
        if most is not None and self.alive + most > self.peaks.get(self.phase, -1):
            self.alive += most
            self._note_peak()
        self.alive = after

    @property
    def storages(self) -> frozenset[int]:
        """The ids of those that are alive."""
        return frozenset(self._known)
