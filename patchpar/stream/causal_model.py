"""Interface of a model that can be streamed: a state per denoising step, one step of one block, and a decoder.

Denoising step s of block b may depend on the inputs of step s for earlier blocks and on the output of step s-1 for
block b, and on nothing else. Then step s can run on its own rank, only latents pass from rank to rank, and the result
is bit-equal to one process ("timestep-forcing pipeline", Live Avatar, arXiv:2512.04677, section 4.2). Models that read
the clean keys and values of earlier blocks cannot be streamed so: block b+1 would wait until block b is finished.

All randomness is keyed by seed, block and step; nothing depends on clocks, on other steps, or on the number of ranks.
"""

from typing import Any, Protocol

from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.stream.events import Change

Payload = tuple[Tensor, ...]


class StageModel(Protocol):
    """What the loop of every stage needs of a model. A payload holds tensors of the shapes that `payload` states."""

    def payload(self) -> tuple[TensorSpec, ...]:
        """Return shapes and dtypes of the tensors passed from one stage to the next, the same for every block."""

    def begin(self, block: int, inputs: Payload) -> Payload:
        """Return the payload with which a block enters the first stage: noise, and `inputs` such as its audio."""


class CausalModel(StageModel, Protocol):
    """A model with `steps` denoising steps per block."""

    @property
    def steps(self) -> int:
        """Denoising steps of a block."""

    @property
    def inner(self) -> int:
        """Ranks per denoising step. All of them call `new_state`, `apply` and `step` in the same order."""

    def new_state(self, step: int) -> Any:
        """Return the empty state of denoising step `step`."""

    def noised(self, block: int, payload: Payload, frames: Tensor) -> Payload:
        """Return the payload of `begin` started from frames [F, height, width, 3] in uint8. Called in order."""

    def posed(self, payload: Payload, frames: Tensor) -> Payload:
        """Return the payload with a pose at its end, from frames [F, height, width, 3] in uint8 of a pose video."""

    def apply(self, state: Any, change: Change) -> None:
        """Change a condition in the state of one step, from its next block on. Raises PlanError."""

    def conditions(self, state: Any) -> Any:
        """Return what changes have made of a state, such as prompt and sink, which later blocks do not change.

        Its method `on_host` returns the same in host memory, picklable.
        """

    def restored(self, step: int, conditions: Any) -> Any:
        """Return a state of denoising step `step` with these conditions, and without earlier blocks."""

    def step(self, state: Any, block: int, payload: Payload) -> Payload:
        """Run one denoising step of one block. Changes `state` and nothing else."""

    @property
    def adapts_sink(self) -> bool:
        """Whether the sink of later blocks is made from the first finished block."""

    def adaptive_sink(self, payload: Payload) -> Change:
        """Return the change that sets this sink, from the payload of the first finished block."""

    def new_decoder(self) -> Any:
        """Return the empty state of a decoder, for a stream's first block."""

    def decode(self, decoder: Any, payload: Payload) -> Tensor:
        """Decode a finished block to [frames, height, width, 3] in uint8. The first block may give fewer frames."""
