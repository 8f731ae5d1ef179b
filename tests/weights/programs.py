"""Programs that call a network once for each guidance branch, with weights sharded over the ranks that share the calls.

Each returns what it computes in a few steps; all ranks run it, and one process with whole weights is the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.errors import PatchparError, UnsupportedModel
from patchpar.plan.step_clock import StepClock
from patchpar.shard.transformer.token_plan import NotWatched
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from patchpar.shard.weights.rounds import GatherRounds
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.shard.weights.stores import KIND
from patchpar.strategies.cfg.split import GuidanceSplit
from tests.ranks import PoolRank
from tests.tensors import noise
from tests.weights import networks
from tests.weights.on_ranks import joined

STEPS = 4
Call = Callable[[int, Tensor], Tensor]  # network, sample [2, width]
Program = Callable[[Call, Tensor, int], Tensor]


def two_calls(call: Call, x: Tensor, step: int) -> Tensor:
    first = call(0, x)
    return first + 2 * call(0, x + 1)


def used_between(call: Call, x: Tensor, step: int) -> Tensor:
    """The second call takes what the first one predicts."""
    return call(0, call(0, x) + x)


def three_calls(call: Call, x: Tensor, step: int) -> Tensor:
    parts = [call(0, x + number) for number in range(3)]
    return parts[0] - parts[1] + parts[2]


def pauses(call: Call, x: Tensor, step: int) -> Tensor:
    """Guidance is off in every second step."""
    return two_calls(call, x, step) if step % 2 == 0 else call(0, x)


def two_networks(call: Call, x: Tensor, step: int) -> Tensor:
    """Each branch has a network of its own, and a third call the first one's."""
    parts = [call(0, x), call(1, x), call(0, x + 1)]
    return parts[0] - parts[1] + parts[2]


def other_shape(call: Call, x: Tensor, step: int) -> Tensor:
    """The last step has a call that was not made before, by all ranks at once, while one call is outstanding."""
    first = call(0, x)
    return first + (call(0, x[:1]) if step == STEPS - 1 else 2 * call(0, x + 1))


PROGRAMS: dict[str, Program] = {
    each.__name__: each for each in (two_calls, used_between, three_calls, pauses, two_networks, other_shape)
}

ERRORS: dict[str, type[Exception]] = {each.__name__: each for each in (NotWatched, RuntimeError, MemoryError)}


@torch.no_grad()
def run(this: PoolRank, name: str, cfg: int, gathered: bool) -> dict[str, Any]:
    """Two runs of a program, compared with one process. Where not `gathered`, slots keep what they have."""
    built = [networks.build("several times"), networks.build("backwards")]
    wanted = _run_steps(PROGRAMS[name], lambda which, x: built[which](x))
    mesh, comm, clock = this.mesh(cfg=cfg, patch=this.world // cfg), this.comm(), StepClock()
    guidance = GuidanceSplit(comm, mesh["cfg"], clock)
    guidance.rounds = rounds = GatherRounds(comm, mesh.of_one_image(), mesh["cfg"])
    weights = [joined(network, comm, mesh.of_one_image()) for network in built]
    calls: list[int] = []
    for network, of_network in zip(built, weights, strict=True):
        keep_what_is_read_outside(of_network, partial(network, networks.sample()))
        network.register_forward_hook(lambda *_: calls.append(clock.call))

    def call(which: int, x: Tensor) -> Tensor:
        clock.next_call()
        rounds.weights = weights[which]
        found: Tensor = guidance.denoise(built[which], x)
        return found

    equal = []
    with pytest.MonkeyPatch.context() as patch:
        if not gathered:
            patch.setattr(ShardedWeights, "_start", lambda self, index: None)
            patch.setattr(ShardedWeights, "_take", lambda self, slot: None)
        for _ in range(2):
            guidance.reset()
            clock.reset()
            equal.append(torch.equal(_run_steps(PROGRAMS[name], call, clock), wanted))
            guidance.finish()
        for of_network in weights:
            of_network.settle()
    return {"equal": equal, "calls": len(calls), "sent": comm.traffic.bytes_sent[KIND]}


@torch.no_grad()
def in_another_order(this: PoolRank) -> str:
    """The message where blocks of a rank's own call run in an order that other ranks do not know."""
    network, mesh = networks.build("chain"), this.mesh(cfg=this.world)
    weights = joined(network, this.comm(), mesh.of_one_image())
    keep_what_is_read_outside(weights, partial(network, networks.sample()))
    network.order = (0, 2, 1)
    with pytest.raises(UnsupportedModel) as raised, weights.round():
        network(networks.sample())
    return str(raised.value)


@torch.no_grad()
def within_each_other(this: PoolRank) -> str:
    """The message for a block that calls another one."""
    network, mesh = networks.build("nested"), this.mesh(cfg=this.world)
    weights = joined(network, this.comm(), mesh.of_one_image())
    keep_what_is_read_outside(weights, partial(network, networks.sample()))
    with pytest.raises(UnsupportedModel) as raised, weights.round():
        network(networks.sample())
    return str(raised.value)


@torch.no_grad()
def fails_in_its_own_call(this: PoolRank, error: str, failing: tuple[int, ...]) -> tuple[str, str, float]:
    """What a rank raises where the own calls of some fail in their second block, and after how many seconds."""
    network, mesh, comm, clock = networks.build("chain"), this.mesh(cfg=this.world), this.comm(), StepClock()
    guidance = GuidanceSplit(comm, mesh["cfg"], clock)
    guidance.rounds = GatherRounds(comm, mesh.of_one_image(), mesh["cfg"])
    guidance.rounds.weights = weights = joined(network, comm, mesh.of_one_image())
    keep_what_is_read_outside(weights, partial(network, networks.sample()))
    plain = network.blocks[1].forward

    def fail(x: Tensor) -> Tensor:
        if clock.evaluation and this.rank in failing:
            raise ERRORS[error]("other arguments")
        found: Tensor = plain(x)
        return found

    def call(which: int, x: Tensor) -> Tensor:
        clock.next_call()
        found: Tensor = guidance.denoise(network, x)
        return found

    network.blocks[1].forward = fail
    guidance.reset()
    clock.reset()
    start = time.monotonic()
    with pytest.raises((PatchparError, MemoryError)) as raised:
        _run_steps(two_calls, call, clock)
    seconds = time.monotonic() - start
    weights.settle()
    return type(raised.value).__name__, str(raised.value), seconds


def _run_steps(program: Program, call: Call, clock: StepClock | None = None) -> Tensor:
    x = noise(2, networks.WIDTH, seed=3)
    for step in range(STEPS):
        x = torch.tanh(program(call, x, step))
        if clock is not None:
            clock.tick()
    return x
