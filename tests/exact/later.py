"""Code in a denoiser that does in later steps what it did not in the first: what ranks of these tests run."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor, nn

from patchpar.errors import PatchparError
from patchpar.plan.step_clock import StepClock
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.tensor.denoiser import TensorDenoiser
from patchpar.shard.unsupported_model import refused_in_words
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies import parse_strategy
from tests.exact import denoisers
from tests.ranks import PoolRank
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS

TIMES = (901, 601, 301, 101)
FIRST_WITH_EFFECT = 2
"""The step in which most of these begin."""

Plant = Callable[[nn.Module, nn.Module], None]
"""Puts code into a denoiser, given it and the module whose output the code changes."""


def centred(x: Tensor) -> Tensor:
    """Without its mean over the image: rows and columns, or tokens."""
    return x - x.mean((-2, -1) if x.ndim == 4 else 1, keepdim=True)


def after(module: Any, change: Callable[[Any], Any]) -> None:
    """Replace the forward of a module by one that changes its output."""
    own = module.forward
    module.forward = lambda *args, **kwargs: change(own(*args, **kwargs))


def _counted(network: Any, site: Any) -> None:
    count = 0

    def change(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return centred(x) if count > FIRST_WITH_EFFECT else x

    after(site, change)


class CountingHook:
    """A hook that counts its calls, and acts from one of them on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return centred(output) if self.calls > FIRST_WITH_EFFECT else output


def _hook(network: Any, site: Any) -> None:
    site.register_forward_hook(CountingHook())


def _by_time(network: Any, site: Any) -> None:
    """As code does that reads the timestep from the arguments of the whole network."""
    own, now = network.forward, {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        now["time"] = float(torch.as_tensor(kwargs["timestep"]).flatten()[0])
        return own(*args, **kwargs)

    network.forward = forward
    after(site, lambda x: centred(x) if now["time"] < TIMES[FIRST_WITH_EFFECT] + 1 else x)


def _by_factor(network: Any, site: Any) -> None:
    """The same functions in every step, with a factor that is zero at first."""
    count = itertools.count()

    def change(x: Tensor) -> Tensor:
        factor = 0.0 if next(count) < FIRST_WITH_EFFECT else 0.7
        return x - factor * x.mean((-2, -1) if x.ndim == 4 else 1, keepdim=True)

    after(site, change)


def _by_tensor(network: Any, site: Any) -> None:
    """The same with a tensor, whose value is in no argument."""
    factors = [torch.tensor(0.0 if step < FIRST_WITH_EFFECT else 0.7) for step in range(100)]
    count = [0]

    def change(x: Tensor) -> Tensor:
        count[0] += 1
        return x - factors[count[0] - 1] * x.mean((-2, -1) if x.ndim == 4 else 1, keepdim=True)

    after(site, change)


def _pointwise(network: Any, site: Any) -> None:
    """Another function of each number from some step on, and another factor in each."""
    count = [0]

    def change(x: Tensor) -> Tensor:
        count[0] += 1
        return torch.tanh(x) * (1 + 0.1 * count[0]) if count[0] > FIRST_WITH_EFFECT else 0.5 * x

    after(site, change)


class Scaled:
    """Scales by the next number of a source."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def __call__(self, x: Tensor) -> Tensor:
        return x * (0.5 + self.source.random())


def _in_turn(network: Any, site: Any) -> None:
    """Two objects that take numbers from one source."""
    source = random.Random(0)
    for _ in range(2):
        after(site, Scaled(source))


def _reused(network: Any, site: Any) -> None:
    """The output of the step before in every second step, as caches of features do."""
    kept: dict[str, Any] = {"step": 0}
    own = site.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept["step"] += 1
        if kept["step"] % 2:
            kept["output"] = own(*args, **kwargs)
        return kept["output"]

    site.forward = forward


def _smoothed(network: Any, site: Any) -> None:
    """A running mean over the steps: each depends on what was kept."""
    kept: list[Tensor] = []

    def change(x: Tensor) -> Tensor:
        kept[:] = [x if not kept else 0.5 * (x + kept[0])]
        return kept[0]

    after(site, change)


def _smoothed_then_more(network: Any, site: Any) -> None:
    """A running mean, and in the last step of an image one more function of it."""
    _smoothed(network, site)
    count = itertools.count(1)
    after(site, lambda x: torch.tanh(x) if next(count) == len(TIMES) else x)


def _generator(network: Any, site: Any) -> None:
    """State that cannot be put back."""
    factors = (factor for factor in itertools.cycle([0.5]))
    after(site, lambda x: next(factors) * x)


def _written(network: Any, site: Any) -> None:
    """A tensor that is written to in every call."""
    total = torch.zeros(())

    def change(x: Tensor) -> Tensor:
        total.add_(0.1)
        return x * total

    after(site, change)


class OwnProcessor(AttnProcessor2_0):
    """The attention processor of a script: diffusers' own, and a factor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 0.9 * super().__call__(*args, **kwargs)


class OwnFluxProcessor(FluxAttnProcessor):
    """The same of another model, whose text is attended to with the image."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(0.9 * x for x in super().__call__(*args, **kwargs))


def _processor(network: Any, site: Any) -> None:
    if hasattr(network, "set_attn_processor") and not hasattr(network, "transformer_blocks"):
        network.set_attn_processor(OwnProcessor())
        return
    for block in network.transformer_blocks:
        block.attn.set_processor(OwnFluxProcessor())


class SkippedBlocks:
    """What DeepCache (Ma et al. 2023, arXiv:2312.00858) does, in its own structure: some steps run outer blocks only.

    Every block and layer gets a forward that returns what the last whole step has kept where a step is skipped. The
    step is found by its timestep, in a forward of the whole network.
    """

    def __init__(self, network: Any, interval: int = 2) -> None:
        self.network, self.interval, self.step = network, interval, 0
        self.functions: dict[Any, Any] = {"network": network.forward}
        self.kept: dict[Any, Any] = {}
        network.forward = self.forward
        for at, block in enumerate(network.down_blocks):
            for number, layer in enumerate(block.resnets):
                self.wrap(layer, "down", at, number)
            self.wrap(block, "down block", at, 0)
        self.wrap(network.mid_block, "mid", 0, 0)
        last = len(network.up_blocks) - 1
        for at, block in enumerate(network.up_blocks):
            for number, layer in enumerate(block.resnets):
                self.wrap(layer, "up", last - at, len(block.resnets) - number - 1)
            self.wrap(block, "up block", last - at, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the network's."""
        self.step = TIMES.index(kwargs["timestep"])
        return self.functions["network"](*args, **kwargs)

    def skips(self, kind: str, at: int, number: int) -> bool:
        """Whether a layer is skipped in this step."""
        if self.step % self.interval == 0:
            return False
        if at > 0 or kind == "mid":
            return True
        return number >= 0 if kind.startswith("down") else number > 0

    def wrap(self, module: Any, kind: str, at: int, number: int) -> None:
        """Replace the forward of one layer."""
        key = kind, at, number
        self.functions[key] = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.skips(*key):
                return self.kept[key]
            result = self.kept[key] = self.functions[key](*args, **kwargs)
            return result

        module.forward = forward


PLANTS: dict[str, Plant] = {
    "processor": _processor,
    "skipped blocks": lambda network, site: SkippedBlocks(network) and None,
    "counted": _counted,
    "hook": _hook,
    "by time": _by_time,
    "by factor": _by_factor,
    "by tensor": _by_tensor,
    "pointwise": _pointwise,
    "in turn": _in_turn,
    "reused": _reused,
    "smoothed": _smoothed,
    "smoothed, then more": _smoothed_then_more,
    "generator": _generator,
    "written": _written,
}


def network_of(kind: str) -> tuple[nn.Module, nn.Module, Callable[[int], dict[str, Any]]]:
    """A denoiser, a module in the middle of it, and the arguments of its call at a time."""
    if kind == "unet":
        unet: Any = denoisers.build("sd")
        return unet, unet.mid_block.resnets[0], lambda time: denoisers.call("sd", 16, 8) | {"timestep": time}
    entry = TRANSFORMERS["FluxTransformer2DModel"]
    model: Any = entry.build()
    site = model.transformer_blocks[0].ff
    return model, site, lambda time: entry.call(0) | {"timestep": torch.full((2,), time / 1000)}


@functools.lru_cache(maxsize=8)
@torch.no_grad()
def plain_steps(kind: str, name: str, times: tuple[float, ...], images: int) -> list[Tensor]:
    """What one process returns in each step of some images."""
    network, site, call = network_of(kind)
    if name:
        PLANTS[name](network, site)
    return [network(**call(time))[0] for _ in range(images) for time in times]


@torch.no_grad()
def found(
    this: PoolRank,
    kind: str,
    name: str,
    folder: str,
    when: str = "before",
    strategy: str = "exact",
    trusted: Sequence[str] = (),
    images: int = 2,
) -> dict[str, Any]:
    """The errors of each step, and how often each ran the network; or what was said, and in which step.

    `when`: the code comes before the denoiser is made parallel, or after a first call of it.
    """
    plant = PLANTS[name]
    want, without = (plain_steps(kind, each, TIMES, images) for each in (name, ""))
    network, site, call = network_of(kind)
    verifications = VerificationCache(Path(folder) / str(this.rank), trusted=frozenset(trusted))
    if when == "before":
        plant(network, site)
    axis, clock = this.mesh(patch=this.world)["patch"], StepClock()
    layer = parse_strategy(strategy).install(network, this.comm(), axis, clock=clock, verifications=verifications)
    if when == "after":
        layer.reset()
        layer.denoise(network.forward, **call(TIMES[0]))
        layer.finish()
        plant(network, site)
    errors, calls = [], []
    effect = max(relative(x, y) for x, y in zip(want, without, strict=True))
    for _ in range(images):
        layer.reset()
        clock.reset()
        for time in TIMES:
            counted = Mock(side_effect=network.forward)  # which is no code of these tests, and so not foreign
            clock.next_call()
            try:
                with refused_in_words(network, "patch", "Use plan cfg=2", lambda time=time: network(**call(time))):
                    got = layer.denoise(counted, **call(time))[0]
            except PatchparError as error:
                return {"step": len(errors), "message": f"{type(error).__name__}: {error}", "errors": errors}
            clock.tick()
            errors.append(relative(got, want[len(errors)]))
            calls.append(counted.call_count)
        layer.finish()
    return {"errors": errors, "calls": calls, "effect": effect}


@torch.no_grad()
def divided(this: PoolRank, axis: str, folder: str) -> str:
    """What is said of a hook in a transformer whose weights are divided along an axis."""
    network, site, call = network_of("tokens")
    _hook(network, site)
    mesh, verifications = (this.comm(), this.mesh(**{axis: this.world})[axis]), VerificationCache(Path(folder))
    try:
        if axis == "tensor":
            TensorDenoiser(network, mesh, verifications).prepare(network.forward, ((), call(TIMES[0])))
        else:
            StagedDenoiser(network, mesh, verifications).denoise(network.forward, **call(TIMES[0]))
    except PatchparError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
