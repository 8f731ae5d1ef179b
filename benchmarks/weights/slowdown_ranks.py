"""What each rank of `benchmarks.weights.slowdown` measures: calls with whole and with sharded weights, in turns."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.timed_rank import TimedRank
from patchpar.comm.pytree import tensors_in
from patchpar.launch.executor import RankContext
from patchpar.models.files import resolve_model
from patchpar.models.info import denoisers_of
from patchpar.models.loading import load_pipeline, with_dtype
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.plan.step_clock import StepClock
from patchpar.shard.hooks import HookSet
from patchpar.shard.weights.device_shards import DeviceShards
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.strategies.exact import ExactPatch

FOLDERS = {"unet": "embedded", "transformer": "embedded-dit"}
KINDS = ("whole", "again", "sharded")
"""Of weights; again: a second copy of whole ones, whose ratio to the first is what chance does to one."""
WARM = 3  # calls that are not timed


@dataclass(slots=True)
class Turns:
    """By turn: seconds of a call, and seconds of the processor, of each of KINDS.

    `compute`: of each block, with whole weights; `gather`: of each block alone. `num_bytes`: of the blocks.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    processor: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    compute: list[list[float]] = field(default_factory=list)
    gather: list[list[float]] = field(default_factory=list)
    num_bytes: int = 0


class SlowdownRank(TimedRank):
    """One rank of an image in equal patches."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        silence_libraries()

    @torch.no_grad()
    def measure(self, model: str, side: int, turns: int) -> Turns:
        """Time calls for images of `side` x `side` pixels. Raises AssertionError unless both give the same bits."""
        whole, (args, kwargs) = first_call(model, side)
        sharded = copy.deepcopy(whole)
        weights = ShardedWeights(sharded, DeviceShards(self.axis, torch.device("cpu")))
        weights.join(self.comm)
        keep_what_is_read_outside(weights, lambda: sharded(*args, **kwargs))
        networks = {"whole": whole, "again": copy.deepcopy(whole), "sharded": sharded}
        runs = {kind: self._divided(network) for kind, network in networks.items()}
        found = Turns(num_bytes=sum(weights.blocks[index].num_bytes for index in weights.in_slots))
        for turn in range(-WARM, turns):
            outputs = {}
            for kind in (KINDS * 2)[turn % 3 :][:3]:
                with self._noted(found, kind, turn >= 0):
                    outputs[kind] = runs[kind](*args, **kwargs)
                    weights.settle()
            same = zip(*(tensors_in(outputs[kind]) for kind in ("whole", "sharded")), strict=True)
            assert all(torch.equal(x, y) for x, y in same), "sharded weights give other bits"
        blocks = [whole.get_submodule(weights.blocks[index].name) for index in weights.in_slots]
        for _ in range(turns):
            found.compute.append(list(seconds_of(blocks, lambda: runs["whole"](*args, **kwargs))))
            found.gather.append(list(self._gathers(weights)))
        weights.restore()
        return found

    def _divided(self, network: nn.Module) -> Callable[..., Any]:
        clock, forward = StepClock(), network.forward
        patched = ExactPatch().install(network, self.comm, self.axis, clock=clock, verifications=None)
        return lambda *args, **kwargs: patched.denoise(forward, *args, **kwargs)

    @contextmanager
    def _noted(self, found: Turns, kind: str, counts: bool) -> Iterator[None]:
        self.together()
        start, processor = time.perf_counter(), time.process_time()
        yield
        if counts:
            found.processor[kind].append(time.process_time() - processor)
            found.seconds[kind].append(time.perf_counter() - start)

    def _gathers(self, weights: ShardedWeights) -> Iterator[float]:
        for index in weights.in_slots:
            self.together()
            start = time.perf_counter()
            weights._start(index)
            weights.settle()
            yield time.perf_counter() - start


def first_call(model: str, side: int) -> tuple[nn.Module, tuple[Any, Any]]:
    """Return an embedded model's denoiser, and the arguments of its first call for an image."""
    source, options, _ = resolve_model(FOLDERS[model], {"torch_dtype": torch.float32})
    pipe = load_pipeline(source, with_dtype(options))
    pipe.set_progress_bar_config(disable=True)
    (denoiser,) = denoisers_of(pipe).values()
    calls: list[tuple[Any, Any]] = []
    with HookSet() as hooks:
        hooks.before(denoiser, lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        pipe(prompt="a red house", height=side, width=side, num_inference_steps=1, output_type="latent")
    for x in denoiser.parameters():  # copied out of the pages of files, as sharded ones are
        x.data = x.data.clone()
    return denoiser.eval().requires_grad_(False), calls[0]


def seconds_of(blocks: list[nn.Module], run: Callable[[], Any]) -> list[float]:
    """Return the seconds that each of the blocks computes in `run`."""
    taken, starts = dict.fromkeys(blocks, 0.0), {}
    with HookSet() as hooks:
        for block in blocks:
            hooks.before(block, lambda module, *_: starts.update({module: time.perf_counter()}))
            hooks.after(block, lambda module, *_: taken.update({module: time.perf_counter() - starts[module]}))
        run()
    return list(taken.values())
