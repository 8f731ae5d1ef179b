"""Times of one GPU: the layers of a plain forward, and one rank's own work against it.

Weights are random, as times do not depend on them. Messages of the rank go nowhere and take no time (`fake_nccl`), so
that what is left is what patchpar adds to the arithmetic of a patch.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks.gpu import denoisers, fake_cuda
from benchmarks.gpu.denoisers import DENOISERS, Denoiser
from benchmarks.gpu.fake_nccl import GroupCounts, fake_nccl
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.plan.mesh import Axis, Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.shard.graphs import step_graphs
from patchpar.shard.graphs.recorder import recorder_for
from patchpar.strategies import parse_strategy

RANK, WORLD = 1, 4
STRATEGIES = ("exact", "displaced", "pcpp", "fresh-edges", "fresh-edges:context=pooled")
RECOMMENDED = ("exact", "fresh-edges")
TIMES, WARM_UP = 5, 2
HEAD_START = 2 * 10**8
"""Cycles for which the device waits while the process enqueues a forward: about a tenth of a second."""
STALE_STEPS = 3  # after which a stale step is like all later ones
GIB = 2**30
WEIGHTS_GIB = {"sdxl": 6, "flux": 26}
ROOM = 1.3  # of the weights, for activations
TINY: dict[str, Any] = {
    "block_out_channels": (32, 64, 64),
    "attention_head_dim": (2, 4, 4),
    "transformer_layers_per_block": (1, 1, 1),
    "layers_per_block": 1,
}

OUTSIDE, WHOLE = "outside of these layers", "whole forward"
Row = dict[str, Any]


class Times(NamedTuple):
    """Of a call: seconds, those that the process takes to enqueue it, and MiB of the device that it takes beside."""

    seconds: float
    enqueued: float
    mib: float


def layers(device: str) -> Iterator[Row]:
    """Yield for each model and type of layer what one forward spends in it, what is left of it, and the whole."""
    yield from left_out(device)
    for name, denoiser in models(device):
        with on_device(device), torch.no_grad():
            denoiser.network(**denoiser.call)
            turns = [_layer_times(device, denoiser) for _ in range(turns_of(device)[1])]
        total = {kind: statistics.median(each[kind][0] for each in turns) for kind in turns[0]}
        for kind, seconds in sorted(total.items(), key=lambda item: -item[1]):
            yield {"model": name, "layer": kind, "calls": turns[0][kind][1], "ms": 1e3 * seconds}


def _layer_times(device: str, denoiser: Denoiser) -> dict[str, tuple[float, int | str]]:
    """Return seconds and calls by type of layer in one forward, outside of all layers, and of the whole."""
    spent = _LayerTimes(device)
    spent.watch(denoiser.network)
    begin_late(device)
    begun = instant(device)
    denoiser.network(**denoiser.call)
    ended = instant(device)
    found: dict[str, tuple[float, int | str]] = {**spent.totals()}
    whole = seconds_between(begun, ended)
    return {**found, OUTSIDE: (whole - sum(seconds for seconds, _ in found.values()), ""), WHOLE: (whole, "")}


def overhead(device: str) -> Iterator[Row]:
    """Yield times of the plain forward, then of each strategy's steps on one rank."""
    yield from _steps_of(device, STRATEGIES)


def compiled(device: str) -> Iterator[Row]:
    """Yield the same with the blocks compiled, of the plain forward and of the strategies that are recommended."""
    backend = {} if device == "cuda" else {"backend": "eager"}
    found = _steps_of(device, RECOMMENDED, lambda network: network.compile_repeated_blocks(fullgraph=True, **backend))
    for row in found:
        yield {**row, "model": f"{row['model']}, compiled"}


def _steps_of(
    device: str, strategies: Collection[str], change: Callable[[Any], object] = lambda network: None
) -> Iterator[Row]:
    """Yield times of the plain forward and of these strategies' steps, after a `change` of the network."""
    yield from left_out(device)
    for name, denoiser in models(device):
        with on_device(device), torch.no_grad():
            change(denoiser.network)
            plain = dict(of_plain(device, denoiser))
            for step, times in plain.items():
                yield {"model": name, "strategy": "plain", "step": step, **cells(times)}
            for strategy in strategies:
                yield from _rows_of(device, name, denoiser, strategy, plain)


def cells(times: Times) -> Row:
    """Return what a row says of a call. A graph has taken its memory before."""
    found: Row = {"ms": 1e3 * times.seconds, "host ms": 1e3 * times.enqueued}
    return {**found, "MiB": round(times.mib)} if times.mib else found


def _rows_of(device: str, name: str, denoiser: Denoiser, strategy: str, plain: dict[str, Times]) -> Iterator[Row]:
    """Yield the rows of a strategy. One that takes more memory than there is says so, and the others go on.

    What Python launches is compared with a plain forward of the same minute, since a host's speed varies by the minute.
    """
    row: Row = {"model": name, "strategy": f"`{strategy}`"}
    beside = {**plain, "eager": seconds_of(device, lambda: denoiser.network(**denoiser.call))}
    refused = list[str]()
    try:
        for step, how, times in _rank_times(device, denoiser, strategy, refused.append):
            of_plain = times.seconds / beside[how].seconds
            ratios = {"of plain": of_plain, "of ideal": of_plain * WORLD}
            yield {**row, "step": f"{step}, {how}", **cells(times), **ratios}
        yield from ({**row, "step": "graph", "note": f"refused: {reason}"} for reason in refused)
    except torch.OutOfMemoryError:
        yield {**row, "step": "out of memory"}
        torch.cuda.empty_cache()


def left_out(device: str, names: Collection[str] = tuple(DENOISERS)) -> Iterator[Row]:
    """Yield a row for each model of these names that does not fit this GPU in full size."""
    free = torch.cuda.mem_get_info()[0] / GIB if device == "cuda" else float("inf")
    for name in names:
        if free <= _needed(name):
            reason = f"left out: it takes {_needed(name):.0f} GiB of the GPU, and {free:.0f} GiB are free"
            yield {"model": name, "note": reason}


def _needed(name: str) -> float:
    """GiB of a GPU."""
    return ROOM * WEIGHTS_GIB[name]


def models(device: str, names: Collection[str] = tuple(DENOISERS)) -> Iterator[tuple[str, Denoiser]]:
    """Yield the models that fit this GPU in full size, of these names (see `left_out`); on a CPU a tiny one."""
    if device == "cpu":
        with on_device(device):
            yield "tiny SDXL", _initialised(denoisers.sdxl(128, layers=TINY), torch.float32)
        return
    free, _ = torch.cuda.mem_get_info()
    for name, build in DENOISERS.items():
        if name in names and free > _needed(name) * GIB:
            yield name, _initialised(build(1024))
            torch.cuda.empty_cache()


def _initialised(denoiser: Denoiser, dtype: torch.dtype | None = None) -> Denoiser:
    """Give the weights values, for what is in memory may be slow to compute with; in `dtype`, if it is given."""
    if dtype is not None:
        call = tree_map_only(torch.Tensor, lambda x: x.to(dtype), denoiser.call)
        denoiser = replace(denoiser, network=denoiser.network.to(dtype), call=call)
    for x in denoiser.network.parameters():
        x.data.normal_(std=0.02)
    return denoiser


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Put models on `device`, such as "cuda:1"; the first of its type without a number. On a CPU events do nothing."""
    where = torch.device(device)
    with ExitStack() as stack:
        for module in (denoisers, fake_cuda):
            found = torch.device(where.type, where.index or 0) if where.type == "cuda" else where
            stack.enter_context(mock.patch.object(module, "DEVICE", found))
        if where.type == "cpu":
            event = mock.Mock(query=lambda: True, elapsed_time=lambda end: 0.0)
            for events in (torch.cuda, torch.cpu):
                stack.enter_context(mock.patch.object(events, "Event", return_value=event))
        yield


def of_plain(device: str, denoiser: Denoiser) -> Iterator[tuple[str, Times]]:
    """Yield the times of the plain forward, launched by Python and as a graph."""

    def forward() -> object:
        return denoiser.network(**denoiser.call)

    yield "eager", seconds_of(device, forward)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        yield "graph", seconds_of(device, graph.replay)


def _rank_times(
    device: str, denoiser: Denoiser, strategy: str, refused: Callable[[str], object]
) -> Iterator[tuple[str, str, Times]]:
    """Yield the kind of a strategy's later steps, how they run, and their times. `refused`: see `of_strategy`.

    The rank is alone, and so is its vote on a capture.
    """
    splits = list[Any]()

    def prepare(split: Any) -> None:
        denoiser.prepare(split)
        splits.append(split)

    with (
        prepared_rank(device, denoiser.network, strategy, prepare, denoiser.call) as step,
        mock.patch.object(step_graphs, "every_rank_has", lambda mesh, where, here: here),
    ):
        yield from of_strategy(device, denoiser.network, strategy, step, splits[0], refused)


def of_strategy(
    device: str,
    network: nn.Module,
    strategy: str,
    step: Callable[[], Any],
    split: Any,
    refused: Callable[[str], object] = print,
) -> Iterator[tuple[str, str, Times]]:
    """Yield the kind of later steps of an opened strategy, how they run, and their times.

    A capture that is refused is left out, and `refused` gets the reason.
    """
    remembers = parse_strategy(strategy).policy.remembers
    kind = "stale" if remembers else "exact"
    for _ in range(STALE_STEPS if remembers else 0):
        step()
    yield kind, "eager", seconds_of(device, step)
    if device == "cuda":
        recorder = recorder_for(split.mesh[0].transport)
        split.use_graphs(step_graphs.StepGraphs(network, recorder, split.mesh))
        for _ in range(STALE_STEPS):
            step()
        if split.graphs.refused:
            refused(split.graphs.refused)
        else:
            yield kind, "graph", seconds_of(device, step)


@contextmanager
def prepared_rank(
    device: str, network: nn.Module, strategy: str, prepare: Callable[[Any], None], call: dict[str, Any]
) -> Iterator[Callable[[], Any]]:
    """Open rank RANK of WORLD on `device`, whose messages go nowhere; what it yields runs one step of `strategy`."""
    with on_device(device), fake_nccl(RANK, WORLD, GroupCounts()):
        transport = TorchTransport(torch.device(device, 0), 600.0)
        axis = Mesh(RANK, range(WORLD), patch=WORLD)["patch"]
        try:
            denoiser = Denoiser(network=network, call=call, prepare=prepare)
            with opened(denoiser, strategy, transport, axis) as (step, _):
                yield step
        finally:
            transport.close()


@contextmanager
def opened(
    denoiser: Denoiser, strategy: str, transport: Transport, axis: Axis
) -> Iterator[tuple[Callable[[], Any], Any]]:
    """Open a strategy on this rank of `axis`; yield what runs a step, and the denoiser as it is split."""
    method, clock = parse_strategy(strategy), StepClock()
    method = replace(method, warmup_steps=1) if method.policy.remembers else method
    split = method.install(denoiser.network, Communicator(transport), axis, clock=clock, split="rows")
    denoiser.prepare(split)

    def step() -> Any:
        clock.next_call()
        output = split.denoise(denoiser.network.forward, **denoiser.call)
        clock.tick()
        return output

    try:
        yield step, split
    finally:
        split.finish()
        split.restore()


def seconds_of(device: str, call: Callable[[], object]) -> Times:
    """Return the medians of a call's seconds, and of what the process takes to enqueue it; and what memory it takes."""
    whole, enqueued = [], []
    warm_up, times = turns_of(device)
    mib = _mib_of(device, call)
    for turn in range(warm_up + times):
        wait(device)
        began = time.perf_counter()
        call()
        returned = time.perf_counter()
        wait(device)
        if turn >= warm_up:
            whole.append(time.perf_counter() - began)
            enqueued.append(returned - began)
    return Times(statistics.median(whole), statistics.median(enqueued), mib)


def _mib_of(device: str, call: Callable[[], object]) -> float:
    """Return by how many MiB a GPU's tensors grow during a call, at most; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    call()  # what it keeps is there before
    wait(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    wait(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def turns_of(device: str) -> tuple[int, int]:
    """Return how many turns are not measured, and how many are; on a CPU times mean nothing."""
    return (WARM_UP, TIMES) if device == "cuda" else (0, 1)


def begin_late(device: str) -> None:
    """Let a GPU wait for a while, so that the process enqueues ahead of it.

    Between two events in a stream there is otherwise also the time in which the process has not launched anything yet,
    as much as the kernels take in a network of many small layers. A stream's queue holds about a thousand launches.
    """
    if device == "cuda":
        torch.cuda._sleep(HEAD_START)


def wait(device: str) -> None:
    """Block until a GPU has done what was enqueued."""
    if device == "cuda":
        torch.cuda.synchronize()


def instant(device: str) -> Any:
    """Return an event in the device's stream, for `seconds_between`; on a CPU the time."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds from one `instant` to another, which the device has reached."""
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


class _LayerTimes:
    """Time in layers that have no layers inside, by type."""

    def __init__(self, device: str) -> None:
        self._device, self._hooks = device, []
        self._events: list[tuple[str, Any, Any]] = []
        self._begun: dict[nn.Module, Any] = {}

    def watch(self, network: nn.Module) -> None:
        """Mark the begin and the end of every layer from now on."""
        for layer in network.modules():
            if not list(layer.children()):
                self._hooks.append(layer.register_forward_pre_hook(self._begin))
                self._hooks.append(layer.register_forward_hook(self._end))

    def _begin(self, layer: nn.Module, _: Any) -> None:
        self._begun[layer] = instant(self._device)

    def _end(self, layer: nn.Module, _: Any, __: Any) -> None:
        self._events.append((type(layer).__name__, self._begun.pop(layer), instant(self._device)))

    def totals(self) -> dict[str, tuple[float, int]]:
        """Return seconds and calls by type of layer, and remove all marks."""
        for hook in self._hooks:
            hook.remove()
        wait(self._device)
        seconds: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for kind, begin, end in self._events:
            seconds[kind] += seconds_between(begin, end)
            calls[kind] += 1
        return {kind: (seconds[kind], calls[kind]) for kind in calls}
