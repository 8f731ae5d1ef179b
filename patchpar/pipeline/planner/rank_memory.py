"""The memory that one rank takes by its recording."""

from dataclasses import dataclass

from patchpar.launch.host_memory import CONTEXT_BYTES
from patchpar.models.dry_run.kernel_buffers import TILES
from patchpar.pipeline.planner.recorded_rank import RecordedRank


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank: its weights, the most of its other tensors at a time, and what CUDA takes.

    `buffers`: what kernels take while they run, beyond that. `stale`: of the other tensors, values that one step leaves
    to the next.
    """

    weights: int
    tensors: int
    context: int = CONTEXT_BYTES
    stale: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.tensors + self.buffers + self.context


def memory_of(rank: RecordedRank) -> RankMemory:
    """Return the memory that a recorded rank takes."""
    weights, tensors = sum(rank.weight_bytes.values()), max(rank.peaks.values())
    buffers = max(rank.working.values()) - tensors + TILES
    return RankMemory(weights=weights, tensors=tensors, buffers=buffers, stale=rank.stale_bytes)
