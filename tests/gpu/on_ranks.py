"""What ranks run in the tests on GPUs: one denoiser in bands against the same denoiser by itself, on their device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from patchpar.errors import ExchangeError
from patchpar.plan.step_clock import StepClock
from patchpar.shard.graphs.recorder import recorder_for
from patchpar.shard.graphs.step_graphs import StepGraphs
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies import parse_strategy
from tests.exact import denoisers
from tests.exact.on_ranks import first, patched
from tests.ranks import PoolRank
from tests.tensors import relative


class GpuErrors(NamedTuple):
    """Relative errors against fp64: of the whole denoiser, of its bands, and of bands without exchange."""

    whole: float
    split: float
    alone: float


def on(device: torch.device, dtype: torch.dtype, tree: Any) -> Any:
    """`tree` on a device, its numbers in `dtype`."""
    return tree_map_only(Tensor, lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), tree)


@torch.no_grad()
def parity(this: PoolRank, name: str, dtype: torch.dtype, strategy: str = "exact", rows: int = 24) -> GpuErrors:
    """`rows` of the latent, for as many ranks as take part."""
    device = torch.device(this.context.device)
    denoiser, call = denoisers.build(name).to(dtype), on(torch.device("cpu"), dtype, denoisers.call(name, rows, 16))
    exact = first(denoiser.double()(**on(torch.device("cpu"), torch.float64, call)))
    denoiser, call = denoiser.to(device, dtype), on(device, dtype, call)
    errors = [relative(first(denoiser(**call)).cpu().double(), exact)]
    bands = patched(this, denoiser, strategy=parse_strategy(strategy))
    for bands.exchange in ("on", "off"):
        errors.append(relative(first(bands.denoise(denoiser.forward, **call)).cpu().double(), exact))
    return GpuErrors(*errors)


@torch.no_grad()
def verified(this: PoolRank, name: str, folder: Path) -> tuple[float, bool]:
    """The error that the verification at the first use finds in fp32, and whether it left the switch of TF32 alone."""
    device, dtype = torch.device(this.context.device), torch.float32
    denoiser, call = denoisers.build(name).to(device, dtype), on(device, dtype, denoisers.call(name, 24, 16))
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    bands = patched(this, denoiser, verifications=VerificationCache(folder / str(this.rank)))
    bands.denoise(denoiser.forward, **call)
    return bands.error, torch.backends.cudnn.allow_tf32


def parity_in_symmetric_memory(this: PoolRank, name: str, dtype: torch.dtype) -> tuple[GpuErrors, bool]:
    """As `parity`, and whether the ranks have such memory."""
    collectives: Any = this.transport.collectives
    assert collectives is not None, "ranks with a card each exchange through NCCL"
    collectives.form([tuple(range(this.world))], symmetric_memory=True)
    return parity(this, name, dtype), bool(collectives._peers)


@torch.no_grad()
def awaited(this: PoolRank, deadline: float, connects: bool) -> tuple[float, str]:
    """Seconds in which ranks that wait for the last one go on, and what they say; it never comes.

    `connects`: beforehand, as before every plan. Else they wait for it in the call that begins the exchange.
    """
    device, peers = torch.device(this.context.device), tuple(range(this.world))
    collectives: Any = this.transport.collectives
    assert collectives is not None, "ranks with a card each exchange through NCCL"
    if connects:
        collectives.form([peers])
    this.transport.deadline, start = deadline, time.monotonic()
    if this.rank == this.world - 1:
        time.sleep(deadline + 2)
        return 0.0, ""
    own, rows = torch.ones(8, device=device), torch.empty(this.world, 8, device=device)
    try:
        collectives.all_gather(peers, own, rows, (), "a message that nobody sends", bulk=False).wait()
        this.transport.settle("the end")
        (rows + 1).cpu()
    except ExchangeError as error:
        return time.monotonic() - start, str(error)
    return time.monotonic() - start, ""


@torch.no_grad()
def aborted(this: PoolRank) -> tuple[float, str]:
    """Seconds in which the groups end while there is a graph with messages of both, and what its replay says then."""
    device, peers = torch.device(this.context.device), tuple(range(this.world))
    collectives: Any = this.transport.collectives
    own, rows = torch.ones(8, device=device), torch.empty(this.world, 8, device=device)

    def gathered() -> Tensor:
        for bulk in (False, True):
            collectives.all_gather(peers, own, rows, (), "a graph", bulk=bulk).wait()
        return rows

    gathered()
    recording = recorder_for(this.transport).capture(gathered, "a step")
    recording.replay()
    this.transport.settle("a graph")
    start = time.monotonic()
    this.transport.poison("the test ends here")
    seconds = time.monotonic() - start
    try:
        recording.replay()
    except ExchangeError as error:
        return seconds, str(error)
    return seconds, ""


@torch.no_grad()
def replayed(this: PoolRank, name: str, dtype: torch.dtype, strategy: str, evaluations: int) -> tuple[list[float], int]:
    """Relative differences between steps that run and the same ones as graphs, and how many were replays."""
    device, predictions, replays = torch.device(this.context.device), [], 0
    for with_graphs in (False, True):
        denoiser, clock = denoisers.build(name).to(device, dtype), StepClock()
        bands = parse_strategy(strategy).install(
            denoiser, this.comm(), this.mesh(patch=this.world)["patch"], clock=clock
        )
        if with_graphs:
            bands.use_graphs(StepGraphs(denoiser, recorder_for(this.transport), bands.mesh, required=True))
        found = []
        for evaluation in range(evaluations):
            call = on(device, dtype, denoisers.call(name, 32, 16))
            call["sample"] = call["sample"] * (1 + 0.1 * evaluation)
            call["timestep"] = torch.tensor(900.0 - 20 * evaluation, device=device)
            clock.next_call()
            found.append(first(bands.denoise(denoiser.forward, **call)).double().cpu())
            clock.tick()
        bands.finish()
        predictions.append(found)
        replays = bands.graphs.replays if bands.graphs is not None else 0
    return [relative(*pair) for pair in zip(*reversed(predictions), strict=True)], replays
