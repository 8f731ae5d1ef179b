"""Weights of several networks made whole: all of them, or none where they do not fit a device together."""

from collections.abc import Iterable

from patchpar.shard.weights.sharded import ShardedWeights


def restore_all(several: Iterable[ShardedWeights]) -> None:
    """Gather the blocks of all these for good, bit for bit as they were, and remove their hooks. Collective.

    Raises PlanError, with nothing changed, where they do not fit a device together. Raises ExchangeError.
    """
    several = list(several)
    kinds, need = list[str](), 0
    for weights in several:
        weights.settle()
        if weights.in_slots:
            kinds.append(type(weights.network).__name__)
            need += weights.times_whole * sum(weights.blocks[index].num_bytes for index in weights.in_slots)
            weights.store.refuse_whole(", ".join(kinds), need)
    for weights in several:
        weights.restore()
