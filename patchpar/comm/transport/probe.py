"""An engine that only proves that ranks can talk: what `patchpar doctor` runs."""

import torch

from patchpar.comm.transport.connect import connect
from patchpar.comm.transport.message import Incoming, Outgoing, TensorSpec
from patchpar.launch.executor import RankContext


class Probe:
    """Adds up one number from each rank."""

    def __init__(self, place: RankContext) -> None:
        self._place = place

    def sum_of_ranks(self) -> int:
        """0 + 1 + ... over all ranks, by one exchange between the ranks' own devices. Raises ExchangeError."""
        number = torch.tensor([self._place.rank], device=self._place.device)
        others = tuple(rank for rank in range(self._place.world_size) if rank != self._place.rank)
        if not others:
            return int(number)
        transport = connect(self._place)
        try:
            incoming = [Incoming(rank, (TensorSpec.of(number),)) for rank in others]
            received = transport.swap([Outgoing(others, (number,))], incoming, "probe").wait()
            return int(number) + sum(int(value) for (value,) in received)
        finally:
            transport.close()
