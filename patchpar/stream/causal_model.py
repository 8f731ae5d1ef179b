"""What a model must offer to be streamed: a memory per denoising step, one step of one block, and a decoder.

Denoising step s of block b may depend on what step s has seen of earlier blocks and on what step s-1 made of block b,
and on nothing else. Then step s can live on a rank of its own, with only latents passing from rank to rank, and the
result is that of one process to the last bit ("timestep-forcing pipeline", Live Avatar, arXiv:2512.04677, section 4.2).
Models that read the clean keys and values of earlier blocks cannot: block b+1 would have to wait until block b is done.

All randomness is keyed by seed, block and step; nothing depends on clocks, on other steps, or on the number of ranks.
"""

from typing import Any, Protocol

from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.stream.events import Change

Payload = tuple[Tensor, ...]


class CausalModel(Protocol):
    """A model with `steps` denoising steps per block."""

    @property
    def steps(self) -> int:
        """Denoising steps of a block."""

    @property
    def inner(self) -> int:
        """Ranks that share each step. They make the same calls of `new_state`, `apply` and `step`, in one order."""

    def payload(self) -> tuple[TensorSpec, ...]:
        """What travels from one step to the next, the same for every block of a stream."""

    def new_state(self, step: int) -> Any:
        """An empty memory for denoising step `step`."""

    def begin(self, block: int, inputs: Payload) -> Payload:
        """What step 0 of a block starts from: noise, and `inputs` such as the block's audio."""

    def apply(self, state: Any, change: Change) -> None:
        """Change a condition of one step's memory, from its next block on. Raises PlanError."""

    def step(self, state: Any, block: int, payload: Payload) -> Payload:
        """One denoising step of one block. Changes `state` and nothing else."""

    @property
    def adapts_sink(self) -> bool:
        """Whether the first finished block makes a sink for later ones."""

    def adaptive_sink(self, payload: Payload) -> Change:
        """That sink."""

    def new_decoder(self) -> Any:
        """An empty memory for decoding a stream from its first block."""

    def decode(self, decoder: Any, payload: Payload) -> Tensor:
        """Frames of a finished block, (frames, height, width, 3) in uint8; how many may differ for the first."""
