"""Operations in which all ranks of a group take part at once: one of torch.distributed's collectives each."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from patchpar.comm.transport.message import Incoming, Messages, Work

Started = Callable[[dist.Work, Tensor, Sequence[Tensor], Sequence[Incoming], str], Work[Messages]]


class TorchCollectives:
    """Collectives of torch.distributed, in a process group for every set of ranks, made when first needed.

    `started` returns the handle of one: (work, buffer sent, buffer of each message received, messages, exchange point).
    """

    def __init__(self, started: Started) -> None:
        self._started = started
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def all_gather(
        self, ranks: tuple[int, ...], own: Tensor, out: Tensor, incoming: Sequence[Incoming], where: str
    ) -> Work[Messages]:
        """See `Collectives`."""
        # `all_gather_into_tensor` is its name up to torch 2.12, deprecated since.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(out.view(-1), own, group=self._group(ranks), async_op=True)
        return self._started(work, own, [out[ranks.index(message.peer)] for message in incoming], incoming, where)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the group of `ranks`, ascending. When first asked for, all of them have to do so."""
        found = self._groups.get(ranks)
        if found is None:
            found = self._groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return found
