"""A rank whose messages go nowhere, and that receives empty tensors: what one rank computes, without the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.transport import Incoming, Messages, Outgoing, Work


class Unanswered(Work[Messages]):
    """Messages that nobody sends: their tensors are empty."""

    def __init__(self, incoming: Sequence[Incoming], where: str, device: torch.device) -> None:
        super().__init__(incoming, where)
        self._device = device

    def _receive(self, index: int) -> list[Tensor]:
        message = self.incoming[index]
        into = message.into or [None] * len(message.specs)
        return [
            torch.empty(spec.shape, dtype=spec.dtype, device=self._device) if x is None else x
            for spec, x in zip(message.specs, into, strict=True)
        ]


class Nobody:
    """A transport of rank `rank` to nobody."""

    collectives = None
    deadline = 1.0

    def __init__(self, rank: int, device: str = "meta") -> None:
        self.rank, self.device = rank, torch.device(device)
        self.waiting: AbstractContextManager[None] = nullcontext()

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str, **_: Any) -> Any:
        """See `Transport`."""
        return Unanswered(incoming, where, self.device)

    def settle(self, where: str) -> None:
        """Nothing is under way."""

    def poison(self, reason: str) -> None:
        """Nothing is left over."""

    def close(self) -> None:
        """Nothing is open."""
