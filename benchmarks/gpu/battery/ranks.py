"""Steps of strategies with a GPU for each rank and real messages: what a rank's own work leaves out.

Every rank has the whole model with random weights. A step takes as long as on the slowest rank.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from benchmarks.gpu.battery.timing import (
    STRATEGIES,
    Row,
    Times,
    cells,
    left_out,
    models,
    of_plain,
    of_strategy,
    on_device,
    opened,
)
from benchmarks.gpu.denoisers import DENOISERS, Denoiser
from patchpar.comm.transport import connect
from patchpar.errors import PatchparError
from patchpar.launch.accelerators import kind_of, release_cached, select_device
from patchpar.launch.executor import RankContext
from patchpar.launch.local import LocalExecutor
from patchpar.plan.mesh import Mesh

WORLDS = (2, 4, 8)
PLAIN = "plain"
ENGINE = "benchmarks.gpu.battery.ranks:SteppingRank"
DEADLINE = 120.0  # seconds in which a rank waits for another
EXPECTED = 600.0  # seconds for a model and a strategy, with the weights
Found = dict[tuple[str, str], Times]
"""Times by kind of step, and how it runs."""


def ranks(device: str) -> Iterator[Row]:
    """Yield times of each strategy on 2, 4 and 8 GPUs, as far as there are so many; on a CPU of two workers.

    What fails is a row that says so, and the other strategies go on with new ranks.
    """
    count = torch.cuda.device_count() if device == "cuda" else WORLDS[0]
    if count < WORLDS[0]:
        yield {"note": "one GPU: no rank has another one to exchange with"}
        return
    small = list(left_out(device))
    yield from small
    names = [name for name in DENOISERS if name not in [row["model"] for row in small]]
    for world in (world for world in WORLDS if world <= count):
        yield from _on(device, world, names if device == "cuda" else names[:1])


def _on(device: str, world: int, names: list[str]) -> Iterator[Row]:
    devices = [f"{device}:{rank}" if device == "cuda" else device for rank in range(world)]
    left = [(name, strategy) for name in names for strategy in (PLAIN, *STRATEGIES)]
    plain: dict[tuple[str, str], float] = {}
    while left:
        with LocalExecutor(devices, ENGINE, deadline=DEADLINE) as pool:
            while left:
                name, strategy = left.pop(0)
                row = {"model": name, "GPUs": world, "strategy": strategy if strategy == PLAIN else f"`{strategy}`"}
                try:
                    found = slowest(pool.call("measure", name, strategy, expected=EXPECTED))
                except PatchparError as error:
                    yield {**row, "result": "failed", "note": str(error).splitlines()[0][:200]}
                    break
                for (kind, how), times in found.items():
                    if strategy == PLAIN:
                        plain[name, how] = times.seconds
                    of_step = cells(times)
                    if (name, how) in plain:
                        of_step["of ideal"] = times.seconds / (plain[name, how] / world)
                    yield {**row, "step": f"{kind}, {how}" if kind else how, **of_step}


def slowest(of_ranks: list[Found]) -> Found:
    """Return the times of the rank that takes longest. Ways in which not all ranks ran, as a graph, are left out."""
    common = [key for key in of_ranks[0] if all(key in each for each in of_ranks)]
    return {key: max(each[key] for each in of_ranks) for key in common}


class SteppingRank:
    """The engine of one rank."""

    def __init__(self, context: RankContext) -> None:
        select_device(context.device)
        self._device, self._transport = context.device, connect(context)
        self._axis = Mesh(context.rank, range(context.world_size), patch=context.world_size)["patch"]
        self._denoisers: dict[str, Denoiser] = {}

    @torch.no_grad()
    def measure(self, name: str, strategy: str) -> Found:
        """Return the times of a step, of the plain model or of a strategy. Needs all ranks."""
        kind = kind_of(self._device)
        with on_device(self._device):
            denoiser = self._denoiser(kind, name)
            if strategy == PLAIN:
                return {("", how): times for how, times in of_plain(kind, denoiser)}
            with opened(denoiser, strategy, self._transport, self._axis) as (step, split):
                found = of_strategy(kind, denoiser.network, strategy, step, split)
                return {(which, how): times for which, how, times in found}

    def _denoiser(self, kind: str, name: str) -> Denoiser:
        """Return a model with the same weights on all ranks; the one before is dropped, for there is room for one."""
        if name not in self._denoisers:
            self._denoisers.clear()
            gc.collect()
            release_cached(torch.device(self._device))  # whether the next one fits is asked of the device
            torch.manual_seed(0)
            ((_, self._denoisers[name]),) = models(kind, [name])
        return self._denoisers[name]
