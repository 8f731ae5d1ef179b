"""How stages go on after a rank has died: what each keeps of its blocks, and what they send one another.

    need          stage k+1 -> k     the next block that it takes, and whether its state is lost
    conditions    stage k -> k+1     if that is so: prompt, sink and so on, as they were after the block before
    blocks        stage k -> k+1     once more, all that it still needs

Only latents have to be kept for it, as many as can be in flight. A stage whose state is lost goes on with an empty
window from the block that the next stage needs; all others go on as if nothing had happened.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.stream.events import pack, unpack
from patchpar.stream.stage_link import BlockEnvelope, receive_in_host, send_in_host

KIND = "resume"
NEED, SIZE = TensorSpec((2,), torch.int64), TensorSpec((1,), torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBlock:
    """A block as it left a stage, or None if that was before the stage began. `conditions`: those after it."""

    block: int
    envelope: BlockEnvelope | None
    conditions: Any


class KeptBlocks:
    """The last `count` blocks of a stage."""

    def __init__(self, count: int) -> None:
        self._kept: deque[KeptBlock] = deque(maxlen=count)

    def add(self, envelope: BlockEnvelope, conditions: Any) -> None:
        """Keep a block."""
        self._kept.append(KeptBlock(block=envelope.block, envelope=envelope, conditions=conditions))

    def begin(self, block: int, conditions: Any) -> None:
        """Forget all, and begin with the state before block `block`."""
        self._kept.clear()
        self._kept.append(KeptBlock(block=block - 1, envelope=None, conditions=conditions))

    def since(self, block: int) -> list[BlockEnvelope]:
        """Return the blocks from number `block` on."""
        return [kept.envelope for kept in self._kept if kept.envelope is not None and kept.block >= block]

    def before(self, block: int) -> KeptBlock | None:
        """Return what there is of the block before number `block`."""
        return next((kept for kept in self._kept if kept.block == block - 1), None)


class StageNeeds:
    """Messages with the neighbouring stages, and with the other ranks of this one, before a stage goes on."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def report(self, peer: int, block: int, *, is_lost: bool) -> None:
        """Report to the stage before on rank `peer` which block is needed next."""
        self._send(peer, torch.tensor([block, is_lost]))

    def of(self, peer: int) -> tuple[int, bool]:
        """Return which block the stage after needs, and whether its state is lost. Raises ExchangeError."""
        block, is_lost = self._receive(peer, NEED).tolist()
        return int(block), bool(is_lost)

    def give(self, peer: int, conditions: Any) -> None:
        """Send conditions to rank `peer`, which has lost them; None if they come with the next block."""
        packed = torch.empty(0) if conditions is None else pack(conditions.on_host())
        self._send(peer, torch.tensor([packed.numel()]))
        if packed.numel():
            self._send(peer, packed)

    def conditions_of(self, peer: int) -> Any:
        """Receive the conditions that `peer` gives. Raises ExchangeError."""
        (size,) = self._receive(peer, SIZE).tolist()
        return unpack(self._receive(peer, TensorSpec((size,), torch.uint8))) if size else None

    def _send(self, peer: int, x: torch.Tensor) -> None:
        send_in_host(self._comm, KIND, [peer], x).wait()

    def _receive(self, peer: int, spec: TensorSpec) -> torch.Tensor:
        return receive_in_host(self._comm, KIND, peer, spec).wait_for(0)[0]
