"""What one rank measures: its device, together with all other ranks, and its links to them, through our transport."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec, Transport, alone, connect
from patchpar.launch.accelerators import device_module, name_of, pin_host_memory, unpin_host_memory
from patchpar.launch.executor import RankContext
from patchpar.launch.host_memory import free_memory
from patchpar.pipeline.planner.tune.kernel_rates import measured_device
from patchpar.pipeline.planner.tune.real_calls import RandomDenoiser, RealCall
from patchpar.pipeline.planner.tune.timer import DeviceTimer, TimedRun
from patchpar.plan.replay.measured_device import MeasuredCall, MeasuredDevice, fitted
from patchpar.plan.replay.measured_machine import LARGE_MESSAGE, MeasuredLink

SMALLEST = 8
"""Bytes of the message that gives the latency."""
SHORT, LONG = 20, 3
"""Repetitions of small and of large messages."""


class TuningRank:
    """The engine of one rank that measures. Calls that all ranks time are made at the same time, as in a real call."""

    def __init__(self, context: RankContext) -> None:
        self._context, self._device = context, torch.device(context.device)
        self._timer = DeviceTimer(self._device)
        self._transport: Transport | None = None
        self._rates: MeasuredDevice | None = None
        self._models: dict[tuple[str, str], RandomDenoiser] = {}
        self._calls: list[RealCall] = []

    def rates(self, dtype: str) -> None:
        """Measure kernels in `dtype`."""
        name, memory = name_of(str(self._device)), _memory_of(self._device)
        self._rates = measured_device(self._timer, getattr(torch, dtype), name, memory)

    def prepare(self, dtype: str, folder: str, size: int) -> None:
        """Make a call of a model folder's denoiser once, for square images of so many pixels on a side."""
        key = folder, dtype
        if key not in self._models:
            self._models[key] = RandomDenoiser(Path(folder), self._device, getattr(torch, dtype))
        self._calls.append(self._models[key].call(size))

    def timed(self) -> list[TimedRun]:
        """Return a round of the call that was prepared last."""
        return self._timer.round(self._calls[-1].run)

    def fit(self, seconds: Sequence[Sequence[float]]) -> MeasuredDevice:
        """Return the device with what the calls have shown. `seconds` of each call, by rank."""
        assert self._rates is not None
        calls = [
            MeasuredCall(operators=call.operators, seconds=taken[self._context.rank])
            for call, taken in zip(self._calls, seconds, strict=True)
        ]
        return fitted(self._rates, sorted(calls, key=lambda call: call.seconds))

    def link(self, lower: int, higher: int) -> MeasuredLink | None:
        """Measure the link between two ranks; the lower one returns it."""
        peers = {lower: higher, higher: lower}
        transport = self._connected()
        peer = peers.get(self._context.rank)
        if peer is None:
            return None
        first = self._context.rank == lower
        latency = min(_one_way(transport, peer, SMALLEST, first=first) for _ in range(SHORT))
        seconds = min(_one_way(transport, peer, LARGE_MESSAGE, first=first) for _ in range(LONG))
        rate = LARGE_MESSAGE / max(seconds - latency, 1e-9)
        return MeasuredLink(pair=(lower, higher), latency=latency, rate=rate) if first else None

    def all_at_once(self, pairs: Sequence[tuple[int, int]]) -> float | None:
        """Measure the seconds in which all pairs send a large message in both directions at once; None without one."""
        transport = self._connected()
        peers = tuple(sum(pair) - self._context.rank for pair in pairs if self._context.rank in pair)
        if not peers:
            return None
        return min(_both_ways(transport, peers) for _ in range(LONG))

    def host_rate(self) -> float:
        """Measure the bytes per second of a copy from the host's memory, pinned where the device has that."""
        message = torch.zeros(LARGE_MESSAGE, dtype=torch.uint8)
        into = torch.empty_like(message, device=self._device)
        is_pinned = pin_host_memory(message, self._device)
        seconds = self._timer.best(partial(into.copy_, message, non_blocking=True))
        if is_pinned:
            unpin_host_memory(message.data_ptr())
        return LARGE_MESSAGE / seconds

    def _connected(self) -> Transport:
        if self._transport is None:
            self._transport = (connect if self._context.world_size > 1 else alone)(self._context)
        return self._transport


def _message(transport: Transport, num_bytes: int) -> torch.Tensor:
    """Return a message [num_bytes]."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=transport.device)


def _one_way(transport: Transport, peer: int, num_bytes: int, *, first: bool) -> float:
    """Return half of the seconds in which a message goes to a rank and comes back."""
    message = _message(transport, num_bytes)
    out, back = [Outgoing((peer,), (message,))], [Incoming(peer, (TensorSpec.of(message),))]
    start = time.perf_counter()
    for outgoing, incoming in ((out, []), ([], back)) if first else (([], back), (out, [])):
        transport.send_recv(outgoing, incoming, "link").wait()
    transport.settle("link")
    return (time.perf_counter() - start) / 2


def _both_ways(transport: Transport, peers: Sequence[int]) -> float:
    message = _message(transport, LARGE_MESSAGE)
    incoming = [Incoming(peer, (TensorSpec.of(message),)) for peer in peers]
    start = time.perf_counter()
    transport.send_recv([Outgoing(tuple(peers), (message,))], incoming, "links").wait()
    transport.settle("links")
    return time.perf_counter() - start


def _memory_of(device: torch.device) -> int:
    """Return the bytes of a device's memory; of the host's, those that are free."""
    if device.type == "cpu":
        return free_memory() or 0
    return int(device_module(device.type).get_device_properties(device).total_memory)
