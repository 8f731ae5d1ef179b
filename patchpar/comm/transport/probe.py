"""A check that all ranks can exchange messages, for `patchpar doctor`."""

import torch

from patchpar.comm.transport.connect import connect
from patchpar.comm.transport.message import Incoming, Outgoing, TensorSpec
from patchpar.launch.executor import RankContext


class Probe:
    """Sums one number from each rank."""

    def __init__(self, endpoint: RankContext) -> None:
        self._endpoint = endpoint

    def sum_of_ranks(self) -> int:
        """Return 0 + 1 + ... over all ranks, by one exchange between their devices. Raises ExchangeError."""
        number = torch.tensor([self._endpoint.rank], device=self._endpoint.device)
        others = tuple(rank for rank in range(self._endpoint.world_size) if rank != self._endpoint.rank)
        if not others:
            return int(number)
        transport = connect(self._endpoint)
        try:
            incoming = [Incoming(rank, (TensorSpec.of(number),)) for rank in others]
            received = transport.send_recv([Outgoing(others, (number,))], incoming, "probe").wait()
            return int(number) + sum(int(value) for (value,) in received)
        finally:
            transport.close()
