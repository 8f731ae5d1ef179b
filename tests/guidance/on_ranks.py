"""What the ranks of the guidance tests run: tiny pipelines with their denoisers behind a GuidanceSplit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import Incoming, Outgoing, Work
from patchpar.errors import PatchparError
from patchpar.plan.mesh import Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.cfg.split import GuidanceSplit, guidance_of
from tests import tiny
from tests.ranks import PoolRank

Tensor = torch.Tensor


class Silence(Work[Any]):
    """Messages of zeros, there at once."""

    def _receive(self, index: int) -> list[Tensor]:
        return [torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.incoming[index].specs]


class NotReading:
    """A transport that sends nothing and hears zeros: what results look like without the exchange."""

    collectives = None

    def __init__(self, this: PoolRank) -> None:
        self.rank, self.device = this.rank, torch.device("cpu")

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> Any:
        return Silence(incoming, where)

    def close(self) -> None: ...


@dataclass
class Ran:
    """What a rank saw of a run."""

    final_latents: Tensor | None = None
    batches: list[int] = field(default_factory=list)  # batch size of each denoiser call made here
    bytes_sent: int = 0
    error: str = ""

    @property
    def latents(self) -> Tensor:
        """What came out. A run that failed says in the test what it failed with."""
        if self.final_latents is None:
            pytest.fail(self.error)
        return self.final_latents


class Splitter:
    """Does for a test what the engine does for a user: clock, hooks on the denoisers, reset and finish."""

    def __init__(self, pipe: Any, comm: Communicator, mesh: Mesh) -> None:
        self.pipe, self.comm, self.mesh = pipe, comm, mesh
        self.clock = StepClock()
        self.split = GuidanceSplit(comm, mesh["cfg"], self.clock)
        self.batches: list[int] = []
        for name in ("unet", "transformer", "transformer_2"):
            if getattr(pipe, name, None) is not None:
                self._wrap(getattr(pipe, name))

    def split_controlnet(self, touch: bool = False) -> list[int]:
        """Split the ControlNet as well; the batch sizes it was called with. `touch`: use its outputs on the way."""
        module, batches = self.pipe.controlnet, []
        plain = module.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            batches.append(len(args[0]))
            return plain(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            down, middle = self.split.condition(counted, *args, **kwargs)
            return ([x * 1 for x in down] if touch else down), middle

        module.forward = forward
        return batches

    def _wrap(self, module: Any) -> None:
        plain = module.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.batches.append(len(args[0] if args else kwargs["hidden_states"]))
            return plain(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.clock.guided = guidance_of(self.pipe, self.arguments)
            self.clock.next_call()
            return self.split.denoise(counted, *args, **kwargs)

        module.forward = forward

    @contextmanager
    def ticking(self) -> Iterator[None]:
        scheduler = self.pipe.scheduler
        plain = scheduler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            self.clock.tick()
            return result

        step.__signature__ = inspect.signature(plain)  # diffusers looks which arguments it takes
        scheduler.step = step
        try:
            yield
        finally:
            del scheduler.step

    def run(self, pipe: tiny.Tiny, **overrides: Any) -> Ran:
        self.arguments = pipe.call_kwargs | overrides
        self.batches.clear()
        self.comm.traffic.clear()
        self.clock.reset()
        self.split.reset()
        ran = Ran()
        try:
            with self.ticking():
                ran.final_latents = tiny.latents(pipe, **overrides)
            self.split.finish()
        except PatchparError as error:
            ran.error = f"{type(error).__name__}: {error}"
        ran.batches, ran.bytes_sent = list(self.batches), self.comm.traffic.total_bytes
        return ran


def runs(this: PoolRank, name: str, calls: Sequence[dict[str, Any]], exchanging: bool = True) -> list[Ran]:
    """One pipeline, guidance spread over all ranks, called once for each of `calls`."""
    pipe = tiny.build(name)
    comm = this.comm() if exchanging else Communicator(NotReading(this))
    splitter = Splitter(pipe.pipe, comm, this.mesh(cfg=this.world))
    if not exchanging:
        splitter.split._post.check = lambda *_: None  # or it would notice
    return [splitter.run(pipe, **call) for call in calls]


def with_controlnet(this: PoolRank, name: str, touch: bool) -> tuple[Ran, list[int]]:
    """The ControlNet is split beside the denoiser."""
    pipe = tiny.build(name)
    splitter = Splitter(pipe.pipe, this.comm(), this.mesh(cfg=this.world))
    batches = splitter.split_controlnet(touch)
    return splitter.run(pipe, steps=2, num_images_per_prompt=2), batches


def scale_set_later(this: PoolRank, name: str, scale: float, ranks: Sequence[int]) -> Ran:
    """Guidance whose scale is changed by a callback after the first step, on the given ranks only."""
    this.transport.deadline = 3.0
    pipe = tiny.build(name)
    splitter = Splitter(pipe.pipe, this.comm(), this.mesh(cfg=this.world))
    callback = set_scale(scale) if this.rank in ranks else None
    return splitter.run(pipe, steps=4, callback_on_step_end=callback)


def set_scale(scale: float) -> Callable[..., dict[str, Any]]:
    """A callback that changes the guidance scale after the first step."""

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = scale
        return {}

    return callback


def drop_guidance(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The callback of diffusers' documentation that ends guidance part way: the batch is halved as well."""
    if step == 1:
        pipe._guidance_scale = 0.0
        return {"prompt_embeds": tensors["prompt_embeds"].chunk(2)[-1]}
    return {}


def dropped(this: PoolRank) -> Ran:
    pipe = tiny.build("sd")
    splitter = Splitter(pipe.pipe, this.comm(), this.mesh(cfg=2))
    inputs = ["latents", "prompt_embeds"]
    return splitter.run(pipe, steps=4, callback_on_step_end=drop_guidance, callback_on_step_end_tensor_inputs=inputs)


def beside_patches(this: PoolRank, name: str) -> Ran:
    """cfg=2 x patch=2: inside each branch the denoiser itself talks to the other rank of axis patch."""
    pipe = tiny.build(name)
    comm, mesh = this.comm(), this.mesh(cfg=2, patch=2)
    plain = pipe.denoiser.forward

    def collective(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        first = output[0]
        both = AllGather(comm, mesh["patch"], "test", "inside").same(first)
        assert torch.equal(both[0], both[1])
        return output

    pipe.denoiser.forward = collective
    return Splitter(pipe.pipe, comm, mesh).run(pipe, steps=2)


def outputs_of(this: PoolRank, as_tuple: bool, sequential: bool) -> list[Any]:
    """Three steps of a denoiser that returns a dataclass or a tuple; whether the results are right and of its type."""
    clock = StepClock(guided=True)
    split = GuidanceSplit(this.comm(), this.mesh(cfg=2)["cfg"], clock)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    found: list[Any] = []

    def forward(sample: Tensor, text: Tensor, *, extra: dict[str, Tensor]) -> Any:
        result = sample * text + extra["bias"]
        return (result, None, 3) if as_tuple else UNet2DConditionOutput(sample=result)

    for _ in range(3):
        text, bias = torch.tensor([2.0, 3.0]).view(2, 1, 1, 1), torch.tensor([5.0, 7.0]).view(2, 1, 1, 1)
        calls = [(latents, text[i : i + 1], bias[i : i + 1]) for i in range(2)]
        if not sequential:
            calls = [(torch.cat([latents] * 2), text, bias)]
        outputs = []
        for sample, word, offset in calls:
            clock.next_call()
            outputs.append(split.denoise(forward, sample, word, extra={"bias": offset}))
        result = torch.cat([output[0] for output in outputs])
        found.append(
            (type(outputs[0]).__name__, torch.equal(result, latents * text + bias), as_tuple and outputs[0][1:])
        )
        clock.tick()
    split.finish()
    return found


def stray(this: PoolRank) -> str:
    """Rank 1 is a step ahead of rank 0. What either says of it."""
    clock = StepClock(guided=True, evaluation=this.rank)
    split = GuidanceSplit(this.comm(), this.mesh(cfg=2)["cfg"], clock)
    clock.next_call()
    sample = torch.ones(2, 4, 8, 8)
    try:
        split.denoise(lambda x: (x,), sample)
    except PatchparError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing noticed"


def unforeseen(this: PoolRank) -> list[str]:
    """A denoiser whose output changes shape for the same sample."""
    clock = StepClock(guided=True)
    split = GuidanceSplit(this.comm(), this.mesh(cfg=2)["cfg"], clock)
    message = []
    for step in range(2):
        rows = 8 + step
        for _ in range(2):
            clock.next_call()
            try:
                (output,) = split.denoise(lambda x, rows=rows: (x.new_ones(1, rows),), torch.ones(1, 8))
                message.append(str(float(output.sum())))
            except PatchparError as error:
                return [*message, f"{type(error).__name__}: {error}"]
        clock.tick()
    return message
