"""What fits: the memory of each rank under a plan, by a formula, before a model is loaded.

    device of a rank  =  weights that stay whole  +  its part of blocks, and resident ones  +  slots
                         +  activations  +  keys and values of the last step
    host memory       =  hosted blocks, once for each image

A stage whose blocks are hosted keeps its own ones on its device; about as many bytes as the other stages. Features
(axis tensor) and stages with whole weights hold all of them until the first call ends, and less afterwards.

Activations are the most of three phases: encoding and denoising as on one device, which is the most that a rank of
several can have, and decoding in bands. On a GPU the context of the process comes on top, which is there when free
memory is asked for; so do buffers of kernels and of NCCL.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from patchpar.launch.host_memory import FreeMemory
from patchpar.models.dry_run.call_memory import NO_CALL, CallMemory
from patchpar.models.dry_run.kept_tokens import kept_bytes
from patchpar.models.dry_run.memory_terms import MemoryTerms, WeightTerms
from patchpar.models.encoders import encoders_of
from patchpar.models.info import denoisers_of, networks_of
from patchpar.plan.plan import Plan
from patchpar.shard.stages.balance import balanced
from patchpar.shard.unet.discover import splits_into_bands
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
    has_bands: bool = False  # as a UNet, which has neither pieces nor features to divide

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
    terms: MemoryTerms
    """What that of the first rank consists of."""

    @property
    def kept(self) -> int:
        """Bytes of keys and values that are kept from step to step."""
        return self.terms.kept

    def fits(self, free: FreeMemory) -> bool | None:
        """Return whether it fits in what is free on each device and of the host; None where that is unknown.

        `free.device` is None for ranks on the CPU, whose memory is that of the host.
        """
        if free.host is None:
            return None
        images = self.plan.data
        if free.device is None:
            return images * sum(self.ranks) + self.host <= free.host
        return max(self.ranks) <= free.device and self.host <= free.host


def network_bytes(pipe: Any) -> dict[str, NetworkBytes]:
    """Return the bytes of every network of a pipeline, which may be on the meta device."""
    denoisers, encoders = denoisers_of(pipe), encoders_of(pipe)
    return {
        name: _bytes_of(
            network,
            is_encoder=name in encoders,
            is_divided=name in denoisers or name.startswith(TEXT_ENCODER),
            has_bands=name in denoisers and splits_into_bands(network),
        )
        for name, network in networks_of(pipe).items()
    }


def memory_of(
    plan: Plan, networks: Mapping[str, NetworkBytes], call: CallMemory = NO_CALL, *, on_gpus: bool = False
) -> PlanMemory:
    """Return the memory of a plan for a call with these activations."""
    size = plan.world_size // plan.data
    terms = MemoryTerms(
        weights=sum((_on_a_rank(each, plan, size) for each in networks.values()), WeightTerms()),
        encode=call.encode,
        denoise=call.denoise,
        decode=call.decode_on_rank(size),
        kept=kept_bytes(plan, call.attentions, _of_the_busiest_stage(networks, plan.stage), late=on_gpus),
    )
    encoders = sum(each.whole for each in networks.values() if each.is_encoder) if plan.encoders == "one" else 0
    in_slots = (sum(_blocks_in_slots(each.blocks, plan.resident)) for each in networks.values() if each.is_divided)
    return PlanMemory(
        plan=plan,
        ranks=(terms.total, *[terms.total - encoders] * (size - 1)),
        host=plan.data * sum(in_slots) if plan.weights == "hosted" else 0,
        terms=terms,
    )


def plans_by_cost(
    base: Plan, networks: Mapping[str, NetworkBytes], call: CallMemory, free: FreeMemory
) -> Iterator[PlanMemory]:
    """Yield what plans with the axes of `base` take, from the one that costs least time to the one that costs most.

    Of resident blocks as many as fit in what is free; see `PlanMemory.fits`.
    """
    on_gpus = free.device is not None
    yield memory_of(base, networks, call, on_gpus=on_gpus)
    several = base.world_size > base.data
    if several and any(each.is_encoder for each in networks.values()):
        yield memory_of(replace(base, encoders="one"), networks, call, on_gpus=on_gpus)
    for kind in ("sharded",) * several + ("hosted",):
        divided = replace(base, weights=kind)
        if resident := _most_resident(divided, networks, call, free):
            yield resident
        yield memory_of(divided, networks, call, on_gpus=on_gpus)


def plans_by_name(
    devices: int, networks: Mapping[str, NetworkBytes], call: CallMemory, *, on_gpus: bool
) -> Iterator[PlanMemory]:
    """Yield what plans take that are used by name only: with stale values, stages, pieces and features."""
    denoisers = [each for each in networks.values() if each.is_divided and not each.is_encoder]
    if devices == 1 or not denoisers:
        return
    plans = [Plan(patch=devices, strategy="fresh-edges")]
    if min(len(each.blocks) for each in denoisers) >= devices:
        plans.append(Plan(stage=devices, weights="hosted"))
        if not any(each.has_bands for each in denoisers):
            plans.append(Plan(stage=devices, weights="hosted", strategy="piped"))
            plans.append(Plan(tensor=devices, weights="hosted"))
    for plan in plans:
        yield memory_of(plan, networks, call, on_gpus=on_gpus)


def _most_resident(
    plan: Plan, networks: Mapping[str, NetworkBytes], call: CallMemory, free: FreeMemory
) -> PlanMemory | None:
    most = max((len(each.blocks) for each in networks.values() if each.is_divided), default=0)
    for resident in range(most - 1, 0, -1):
        found = memory_of(replace(plan, resident=resident), networks, call, on_gpus=free.device is not None)
        if found.fits(free):
            return found
    return None


def _bytes_of(network: nn.Module, **facts: bool) -> NetworkBytes:
    """Return the bytes of a network; a weight that two blocks have in common counts as outside of them."""
    total = _sum_of({id(x): x for x in (*network.parameters(), *network.buffers())})
    found = [{id(x): x for x in (*block.parameters(), *block.buffers())} for block in blocks_of(network).values()]
    owners = Counter(key for each in found for key in each)
    blocks = [_sum_of({key: x for key, x in each.items() if owners[key] == 1}) for each in found]
    return NetworkBytes(outside=total - sum(blocks), blocks=tuple(filter(None, blocks)), **facts)


def _sum_of(tensors: Mapping[int, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def _on_a_rank(network: NetworkBytes, plan: Plan, size: int) -> WeightTerms:
    """Return the bytes of weights and slots of one network on the device of a rank that runs it."""
    if plan.weights == "whole" or not network.is_divided:
        return WeightTerms(whole=network.whole)
    in_slots = _blocks_in_slots(network.blocks, plan.resident)
    divided, slots = sum(in_slots), min(SLOTS, len(in_slots)) * max(in_slots, default=0)
    own = -(-divided // size) if plan.weights == "sharded" else 0
    if plan.stage > 1 and not network.is_encoder:
        own = _largest_run(in_slots, plan.stage)
    resident = sum(network.blocks) - divided
    return WeightTerms(whole=network.outside, blocks=own, resident=resident, slots=slots)


def _of_the_busiest_stage(networks: Mapping[str, NetworkBytes], stages: int) -> float:
    """Return the part of a denoiser's blocks that the stage with most of them has; of several, the largest part."""
    denoisers = [each.blocks for each in networks.values() if each.is_divided and not each.is_encoder and each.blocks]
    if stages == 1 or not denoisers:
        return 1.0
    return max(_largest_run(blocks, stages) / sum(blocks) for blocks in denoisers)


def _largest_run(blocks: Sequence[int], stages: int) -> int:
    """Return the bytes of the largest of so many runs of blocks, which are as equal as blocks allow."""
    cuts = balanced(blocks, range(1, len(blocks)), stages)
    ends = [0, *(cuts or ()), len(blocks)]
    return max((sum(blocks[start:stop]) for start, stop in pairwise(ends)), default=0)


def _blocks_in_slots(blocks: Sequence[int], resident: int) -> list[int]:
    whole = resident_of(len(blocks), resident)
    return [size for index, size in enumerate(blocks) if index not in whole]
