"""An engine that only proves that ranks can talk: what `patchpar doctor` runs."""

from __future__ import annotations

from patchpar.launch.context import RankContext


class Probe:
    """Adds up one number from each rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def sum_of_ranks(self) -> int:
        """0 + 1 + ... over all ranks, by one all-reduce on the ranks' own devices."""
        import torch
        import torch.distributed as dist

        number = torch.tensor([self._context.rank], device=self._context.device)
        if self._context.world_size > 1:
            dist.all_reduce(number)
        return int(number.item())
