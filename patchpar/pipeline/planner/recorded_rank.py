"""What one rank does in a call: its program, and the memory that it takes. No torch, so that kept ones load at once."""

from collections.abc import Mapping
from dataclasses import dataclass

from patchpar.plan.replay.tape import Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRank:
    """The program of one rank. `peaks`: the most bytes of tensors beside the weights, by phase of the call.

    `working`: the same with the buffers of kernels that run meanwhile, such as a convolution's copies of its maps.
    `weight_bytes` of each network; buffers into which shards are gathered, and shards, are among the other tensors.
    So are `stale_bytes`, which the last step leaves to a next one.
    """

    rank: int
    tape: Tape
    peaks: Mapping[str, int]
    working: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    stale_bytes: int = 0
