"""Between two blocks a stage of a stream waits for its GPU nowhere: what the host makes comes from pinned memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.fake_cuda import DEVICE, EventCounts, fake_cuda, put_on_fake_cuda
from benchmarks.gpu.recorder import LiveMemory, Recorder
from patchpar.models.streaming.causal import rope
from patchpar.models.streaming.causal.causal_wan import CausalWan
from patchpar.models.streaming.config import CausalOptions
from patchpar.models.streaming.decoder import WanDecoder
from patchpar.models.streaming.fifo import queue
from patchpar.models.streaming.fifo.network import WanFrames
from patchpar.models.streaming.fifo.queue import FifoOptions
from patchpar.models.streaming.flow_schedule import FlowSchedule
from patchpar.shard.host_memory import to_device
from patchpar.stream.causal import wan
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import Prompt
from patchpar.stream.fifo import stage
from patchpar.stream.fifo.stage import FifoModel
from tests.stream import tiny

BFLOAT, CPU = torch.bfloat16, torch.device("cpu")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """A GPU that is not there; what it yields puts a network on it. Noise, which NumPy makes, has no values either."""

    def noise(seed: int, block: int, step: int, shape: tuple[int, ...], device: torch.device = CPU) -> Tensor:
        return to_device(torch.empty(shape), device)

    for module in (wan, queue, stage):
        monkeypatch.setattr(module, "keyed_noise", noise)

    def put(network: Any) -> Any:
        put_on_fake_cuda(network, BFLOAT)
        return network

    with fake_cuda(EventCounts()):
        yield put


def waits_in(step: Callable[[], object]) -> Counter[str]:
    """Where the process waits for the GPU in the second of two equal steps."""
    step()
    recorder = Recorder(LiveMemory(()))
    with recorder:
        step()
    assert sum(recorder.counts.launches.values()) > 10
    return recorder.counts.syncs


@pytest.mark.parametrize("positions", ["abs", "relative"])
def test_a_block_of_a_block_causal_stream_waits_for_nothing(on_gpu: Callable[[Any], Any], positions: Any) -> None:
    options = CausalOptions(frames=tiny.FRAMES, window=3, sink_distance=5, positions=positions)
    network, decoder = CausalWan(on_gpu(tiny.transformer()), options), WanDecoder(on_gpu(tiny.vae()))
    schedule = FlowSchedule.shifted(2)
    model = WanStream(network, schedule, decoder, tiny.run_of(), tiny.begun_with(tiny.text(0), has_sink=True))
    state, memory, blocks = model.new_state(0), model.new_decoder(), iter(range(9))

    def step() -> None:
        block = next(blocks)
        images = decoder.decode(memory, model.step(state, block, model.begin(block, ()))[0])
        assert images.device == DEVICE

    with torch.no_grad():
        assert not waits_in(step)


def test_a_tick_of_a_queue_of_frames_waits_for_nothing(on_gpu: Callable[[Any], Any]) -> None:
    network = WanFrames(on_gpu(tiny.transformer()))
    model = FifoModel(
        network, None, FifoOptions(window=4, partitions=1, first_steps=1), tiny.run_of(guidance_scale=5.0)
    )
    model.apply(Prompt(text=tiny.text(0), negative=tiny.text(1)))  # as a message brings it, in host memory
    frames = model.first_queue(range(2), lambda: True)

    def step() -> None:
        frames.shift(*model.begin(5, ()), None)
        model.advance(frames)

    assert not waits_in(step)


def test_a_copy_that_waits_is_found(on_gpu: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions of a block are computed on the host, in double precision."""

    def blocking(x: Tensor, device: torch.device) -> Tensor:
        return x.to(device)

    monkeypatch.setattr(rope, "to_device", blocking)
    network = CausalWan(on_gpu(tiny.transformer()), CausalOptions(frames=tiny.FRAMES, window=3, sink_distance=5))
    model = WanStream(network, FlowSchedule.shifted(2), None, tiny.run_of(), tiny.begun_with(tiny.text(0)))
    state, blocks = model.new_state(0), iter(range(9))
    waits = waits_in(lambda: model.step(state, block := next(blocks), model.begin(block, ())))
    assert all(where.startswith("copy from cpu to cuda at ") for where in waits)
    assert sum(waits.values()) == 4
