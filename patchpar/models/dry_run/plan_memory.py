"""What fits: the memory of each rank under a plan, by a formula, before a model is loaded.

    device of a rank  =  weights that stay whole  +  its part of blocks, and resident ones  +  slots  +  activations
    host memory       =  hosted blocks, once for each image

A stage whose blocks are hosted keeps its own ones on its device; about as many bytes as the other stages.

Strategies with stale values hold keys and values of all tokens from one step to the next, on top: `stale_bytes`.

Activations are those of a call on one device, the most that a rank of several can have. Buffers of kernels and drivers
come on top.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from patchpar.models.dry_run.meta_mode import AttentionKeys
from patchpar.models.encoders import encoders_of
from patchpar.models.info import denoisers_of
from patchpar.plan.bands import split_bands
from patchpar.plan.exchange_policy import ExchangePolicy, StaleKV
from patchpar.plan.kv_selection import TokensAcross
from patchpar.plan.mesh import Axis
from patchpar.plan.plan import Plan
from patchpar.shard.stages.balance import balanced
from patchpar.shard.stale.stale_layout import StaleLayout
from patchpar.shard.stale.token_grid import LevelGrid
from patchpar.shard.weights.packed import blocks_of, resident_of

SLOTS = 2  # of each network with divided weights
TEXT_ENCODER = "text_encoder"  # what the names of encoders with divided weights begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkBytes:
    """Bytes of a network's weights: `outside` of blocks, and of each of the `blocks`."""

    outside: int
    blocks: tuple[int, ...]
    is_encoder: bool
    is_divided: bool  # by weights=sharded and weights=hosted

    @property
    def whole(self) -> int:
        """Bytes of all weights."""
        return self.outside + sum(self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMemory:
    """Bytes that a plan takes: on the device of each rank of an image, in order, and in host memory."""

    plan: Plan
    ranks: tuple[int, ...]
    host: int

    def fits(self, device: int | None, host: int | None) -> bool | None:
        """Return whether it fits with so many free bytes on each device and of the host; None where they are unknown.

        `device` is None for ranks on the CPU, whose memory is that of the host.
        """
        if host is None:
            return None
        images = self.plan.data
        if device is None:
            return images * sum(self.ranks) + self.host <= host
        return max(self.ranks) <= device and self.host <= host


def network_bytes(pipe: Any) -> dict[str, NetworkBytes]:
    """Return the bytes of every network of a pipeline, which may be on the meta device."""
    networks = {name: each for name, each in pipe.components.items() if isinstance(each, nn.Module)}
    denoisers, encoders = denoisers_of(pipe), encoders_of(pipe)
    return {
        name: _bytes_of(
            network, is_encoder=name in encoders, is_divided=name in denoisers or name.startswith(TEXT_ENCODER)
        )
        for name, network in networks.items()
    }


def memory_of(plan: Plan, networks: Mapping[str, NetworkBytes], activations: int) -> PlanMemory:
    """Return the memory of a plan.

    Axis `tensor` is left out, and `stage` with whole weights, whose ranks hold less once the first call ends.
    """
    size = plan.world_size // plan.data
    kept = sum(_on_a_rank(each, plan, size) for each in networks.values())
    encoders = sum(each.whole for each in networks.values() if each.is_encoder) if plan.encoders == "one" else 0
    ranks = (kept + activations, *[kept - encoders + activations] * (size - 1))
    in_slots = (sum(_blocks_in_slots(each.blocks, plan.resident)) for each in networks.values() if each.is_divided)
    return PlanMemory(plan=plan, ranks=ranks, host=plan.data * sum(in_slots) if plan.weights == "hosted" else 0)


def plans_by_cost(
    base: Plan, networks: Mapping[str, NetworkBytes], activations: int, device: int | None, host: int | None
) -> Iterator[PlanMemory]:
    """Yield what plans with the axes of `base` take, from the one that costs least time to the one that costs most.

    Of resident blocks as many as fit with so many free bytes on each device and of the host; see `PlanMemory.fits`.
    """
    yield memory_of(base, networks, activations)
    several = base.world_size > base.data
    if several and any(each.is_encoder for each in networks.values()):
        yield memory_of(replace(base, encoders="one"), networks, activations)
    for kind in ("sharded",) * several + ("hosted",):
        divided = replace(base, weights=kind)
        if resident := _most_resident(divided, networks, activations, device, host):
            yield resident
        yield memory_of(divided, networks, activations)


def stale_bytes(policy: ExchangePolicy, attended: Mapping[AttentionKeys, int], ranks: int, *, sends_late: bool) -> int:
    """Return the bytes of keys and values that a rank of so many holds from one step to the next.

    `attended`: of a step on one device, see `DryRun`; text among their tokens counts as if it were kept. `sends_late`:
    as between GPUs over NCCL, see `shard.stale.send_window`. 0 for a policy that keeps none.
    """
    if not isinstance(policy.context, StaleKV):
        return 0
    held, shared, axis = 0, 0, Axis("patch", 0, ranks, tuple(range(ranks)))
    for keys, number in attended.items():
        if keys.tokens < ranks:
            continue
        layout = StaleLayout(
            policy.context,
            axis,
            LevelGrid(split_bands(keys.tokens, ranks, 1), TokensAcross(1), -2),
            token=(2, keys.batch, keys.heads, keys.width),
            itemsize=keys.itemsize,
            joins=policy.published or policy.context.narrow_to is not None,
            may_wait=sends_late,
        )
        held += number * layout.num_bytes.total
        shared = max(shared, layout.workspace_bytes + layout.window_bytes)
    return held + shared


def _most_resident(
    plan: Plan, networks: Mapping[str, NetworkBytes], activations: int, device: int | None, host: int | None
) -> PlanMemory | None:
    most = max((len(each.blocks) for each in networks.values() if each.is_divided), default=0)
    for resident in range(most - 1, 0, -1):
        found = memory_of(replace(plan, resident=resident), networks, activations)
        if found.fits(device, host):
            return found
    return None


def _bytes_of(network: nn.Module, *, is_encoder: bool, is_divided: bool) -> NetworkBytes:
    """Return the bytes of a network; a weight that two blocks have in common counts as outside of them."""
    total = _sum_of({id(x): x for x in (*network.parameters(), *network.buffers())})
    found = [{id(x): x for x in (*block.parameters(), *block.buffers())} for block in blocks_of(network).values()]
    owners = Counter(key for each in found for key in each)
    blocks = [_sum_of({key: x for key, x in each.items() if owners[key] == 1}) for each in found]
    return NetworkBytes(
        outside=total - sum(blocks), blocks=tuple(filter(None, blocks)), is_encoder=is_encoder, is_divided=is_divided
    )


def _sum_of(tensors: Mapping[int, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def _on_a_rank(network: NetworkBytes, plan: Plan, size: int) -> int:
    """Return the bytes of weights and slots of one network on the device of a rank that runs it."""
    if plan.weights == "whole" or not network.is_divided:
        return network.whole
    in_slots = _blocks_in_slots(network.blocks, plan.resident)
    divided, slots = sum(in_slots), min(SLOTS, len(in_slots)) * max(in_slots, default=0)
    own = -(-divided // size) if plan.weights == "sharded" else 0
    if plan.stage > 1 and not network.is_encoder:
        own = _largest_run(in_slots, plan.stage)
    return network.whole - divided + own + slots


def _largest_run(blocks: Sequence[int], stages: int) -> int:
    """Return the bytes of the largest of so many runs of blocks, which are as equal as blocks allow."""
    cuts = balanced(blocks, range(1, len(blocks)), stages)
    ends = [0, *(cuts or ()), len(blocks)]
    return max((sum(blocks[start:stop]) for start, stop in pairwise(ends)), default=0)


def _blocks_in_slots(blocks: Sequence[int], resident: int) -> list[int]:
    whole = resident_of(len(blocks), resident)
    return [size for index, size in enumerate(blocks) if index not in whole]
