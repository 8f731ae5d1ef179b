"""What each rank of `benchmarks.overlap` runs: steps of one strategy over a delayed transport, timed and recorded."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention import FeedForward
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from benchmarks.scaling import large
from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import DelayedTransport, Incoming, Messages, Outgoing, Transport, Work, connect
from patchpar.launch.executor import RankContext
from patchpar.pipeline.planner.tune.timer import waited_for_cores
from patchpar.plan.mesh import Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.strategies import parse_strategy

LAYER_SECONDS = 0.015
WARM = 2  # steps: the first has no past, and the first after it is stale for the first time


@dataclass(slots=True)
class Exchange:
    """One exchange: when it was sent and first waited for, how long it was waited for, and what left this rank."""

    where: str
    sent: float
    num_bytes: int
    needed: float | None = None
    waited: float = 0.0


class Recorder:
    """A transport that notes what passes, and when by `now`: `clock`, less the `waited` seconds if `without_waits`."""

    collectives = None

    clock = staticmethod(time.thread_time)

    def __init__(self, inner: DelayedTransport) -> None:
        self.inner, self.rank, self.device, self.deadline = inner, inner.rank, inner.device, inner.deadline
        self.exchanges: list[Exchange] = []
        self.waited, self.without_waits = 0.0, False

    def now(self) -> float:
        return self.clock() - (self.waited if self.without_waits else 0.0)

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> RecordedWork:
        send_recv = Exchange(where, self.now(), sum(message.num_bytes for message in outgoing))
        self.exchanges.append(send_recv)
        return RecordedWork(self.inner.send_recv(outgoing, incoming, where), send_recv, self)

    def close(self) -> None:
        self.inner.close()


class RecordedWork(Work[Messages]):
    """Notes when it is first waited for."""

    def __init__(self, pending: Work[Messages], send_recv: Exchange, recorder: Recorder) -> None:
        super().__init__(pending.incoming, pending.where)
        self._pending, self._send_recv, self._recorder = pending, send_recv, recorder

    def _receive(self, index: int) -> list[Tensor]:
        with self._noted():
            return self._pending.wait_for(index)

    def _leave(self) -> None:
        with self._noted():
            self._pending.wait()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        if self._send_recv.needed is None:
            self._send_recv.needed = self._recorder.now()
        start = time.perf_counter()
        yield
        waited = time.perf_counter() - start
        self._recorder.waited += waited
        self._send_recv.waited += waited


def sleeping() -> Any:
    """A small UNet whose layers sleep on top of computing: the same overlap, on cores that others use as well."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(16, 32, 32),
        attention_head_dim=(1, 1, 2),
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    for module in unet.modules():
        if isinstance(module, (ResnetBlock2D, FeedForward)):
            module.register_forward_pre_hook(_sleep)
    inputs = {"encoder_hidden_states": torch.randn(2, 28, 32), "return_dict": False}
    return unet.eval(), (torch.randn(2, 4, 32, 32), torch.tensor(500)), inputs


def _sleep(*_: object) -> None:
    time.sleep(LAYER_SECONDS)


MODELS = {"large": large, "sleeping": sleeping}


class WaitedSteps(NamedTuple):
    """Seconds of steps, and of a step in the mean those of waits for messages, and for cores that others had."""

    seconds: list[float]
    messages: float
    cores: float


class Steps:
    """Steps of one strategy at a time, on one of two ranks. `bare` is the way to the other."""

    def __init__(self, bare: Transport, beat: Callable[[str], object] | None = None) -> None:
        self.line = DelayedTransport(bare)
        self.recorder = Recorder(self.line)
        self.comm = Communicator(self.recorder, beat)
        self.axis = Mesh(bare.rank, range(2), patch=2)["patch"]
        self.meet = AllGather(Communicator(bare, beat), self.axis, "meet", "meeting")
        self.clock = StepClock()
        self.forward, self.patched, self.inputs = None, None, None

    def prepare(self, strategy: str, model: str) -> None:
        """Install a strategy and run the steps that are like no other."""
        denoiser, *inputs = MODELS[model]()
        self.forward, self.inputs = denoiser.forward, inputs
        options = parse_strategy(strategy)
        if hasattr(options, "warmup_steps"):
            options = replace(options, warmup_steps=1)
        self.recorder.clock = time.perf_counter if model == "sleeping" else time.thread_time
        self.clock = StepClock()
        self._link(0.0, float("inf"), 0)
        self.patched = options.install(denoiser, self.comm, self.axis, clock=self.clock, verifications=None)
        self._steps(WARM)

    def release(self) -> None:
        """Let what is under way arrive, and take the strategy out."""
        self._link(0.0, float("inf"), 0)
        self.patched.reset()
        self.patched.restore()
        self.patched = None

    def measure(self, link: tuple[float, float, int], settle: int, timed: int) -> list[float]:
        """Seconds of each of `timed` steps over `link` (latency, rate, overtake), after `settle` untimed ones."""
        self._link(*link)
        self.meet.same(torch.zeros(1))
        self._steps(settle)
        return self._steps(timed)

    def measure_waits(self, link: tuple[float, float, int], settle: int, timed: int) -> WaitedSteps:
        """The same as `measure`, with the mean seconds of a step that this rank waited for messages, and for cores."""
        self._link(*link)
        self.meet.same(torch.zeros(1))
        self._steps(settle)
        before, for_cores = self.recorder.waited, waited_for_cores()
        times = self._steps(timed)
        return WaitedSteps(times, (self.recorder.waited - before) / timed, (waited_for_cores() - for_cores) / timed)

    def record(self, steps: int = 1, *, without_waits: bool = False) -> dict[str, Any]:
        """Exchanges on the bare link, as (exchange point, sent, needed, bytes, age) in seconds of computing.

        Of so many steps in a row, the first of which has a number that they divide. `without_waits`: of a clock that
        does not run while the rank waits for messages. `waits`: seconds of each.
        """
        self.recorder.without_waits = without_waits
        self._link(0.0, float("inf"), 0)
        self.meet.same(torch.zeros(1))
        self._steps(1 + -(self.clock.evaluation + 1) % steps)
        self.recorder.exchanges, start = [], self.recorder.now()
        self._steps(steps)
        exchanges, end = list(self.recorder.exchanges), self.recorder.now()
        self._steps(1)
        return {
            "seconds": end - start,
            "messages": [_seen(send_recv, start, end) for send_recv in exchanges],
            "waits": [send_recv.waited for send_recv in exchanges],
        }

    def _link(self, latency: float, rate: float, overtake: int) -> None:
        self.line.latency, self.line.rate, self.line.overtake = latency, rate, overtake

    def _steps(self, count: int) -> list[float]:
        args, kwargs = self.inputs
        times = [time.perf_counter()]
        with torch.no_grad():
            for _ in range(count):
                self.clock.next_call()
                self.patched.denoise(self.forward, *args, **kwargs)
                self.clock.tick()
                times.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(times)]


class Bench(Steps):
    """The engine of one rank."""

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        super().__init__(connect(context), context.beat)


def _seen(send_recv: Exchange, start: float, end: float) -> tuple[str, float, float, int, int]:
    assert send_recv.needed is not None, f"{send_recv.where} was not waited for within two steps"
    age = int(send_recv.needed > end)
    return send_recv.where, send_recv.sent - start, send_recv.needed - (end if age else start), send_recv.num_bytes, age
