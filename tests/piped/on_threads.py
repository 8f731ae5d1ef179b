"""A network in pieces that pass through stages, each on a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.piped import PipedStages
from tests.stages.on_ranks import held
from tests.tiny.transformers import TRANSFORMERS
from tests.tokens.ranks import predictions
from tests.unit.threads import on_threads
from tests.weights.on_ranks import same_state, state_of

from .networks import Loop

DEADLINE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRank:
    """What a stage found: the prediction of every step, bytes sent in the last one, and weights held after it."""

    predictions: list[Tensor]
    sent: dict[str, int]
    held: float
    restored: bool
    denoiser: Any


def in_stages(
    name: str,
    strategy: PipedStages,
    calls: Sequence[dict[str, Any]],
    *,
    stages: int = 2,
    folder: Path,
    change: Callable[[nn.Module], None] = lambda network: None,
    exchange: str = "on",
) -> list[OfRank]:
    """The steps of an image on every stage. Raises the first stage's error."""
    networks = [TRANSFORMERS[name].build() for _ in range(stages)]  # threads share torch's random state
    for network in networks:
        change(network)

    def on_rank(transport: Any) -> OfRank:
        network, comm, clock = networks[transport.rank], Communicator(transport), StepClock()
        axis = Axis("stage", transport.rank, stages, tuple(range(stages)))
        verified = VerificationCache(folder / str(transport.rank))
        cache = verified if exchange == "on" else None  # stages may be cut elsewhere than in what has been verified
        before, whole = state_of(network), held(network)
        denoiser = strategy.install(network, comm, axis, clock=clock, verifications=cache)
        denoiser.stages.exchange = exchange
        loop = Loop(denoiser, network, clock)
        found = loop.run(calls)
        comm.traffic.clear()
        clock.next_call()
        with torch.no_grad():
            found.append(predictions(denoiser.denoise(network.forward, **calls[-1]))[0].clone())
        sent, part = {kind: count for kind, count in comm.traffic.bytes_sent.items() if count}, held(network) / whole
        denoiser.restore()
        return OfRank(predictions=found, sent=sent, held=part, restored=same_state(network, before), denoiser=denoiser)

    return raised_or(on_threads(stages, on_rank, deadline=DEADLINE))


@torch.no_grad()
def euler(loop: Loop, name: str, given: dict[str, Any], steps: int = 4) -> list[Tensor]:
    """The latents after every step of a loop that subtracts a part of the prediction."""
    tokens = TRANSFORMERS[name].tokens
    x, found = given[tokens], []
    for _ in loop.steps(steps):
        prediction = loop.prediction(given | {tokens: x})
        x = x - 0.1 * (prediction if prediction.shape == x.shape else prediction.chunk(2, 1)[0])
        found.append(x)
    return found


def looped_in_stages(
    name: str,
    strategy: PipedStages,
    given: dict[str, Any],
    *,
    folder: Path,
    in_bands: bool = True,
    change: Callable[[int, Any], None] = lambda stage, denoiser: None,
) -> list[list[Tensor]]:
    """The latents of `euler` on both of two stages."""
    networks = [TRANSFORMERS[name].build() for _ in range(2)]

    def on_rank(transport: Any) -> list[Tensor]:
        network, clock = networks[transport.rank], StepClock()
        axis, cache = Axis("stage", transport.rank, 2, (0, 1)), VerificationCache(folder / str(transport.rank))
        denoiser = strategy.install(network, Communicator(transport), axis, clock=clock, verifications=cache)
        denoiser.in_bands = in_bands
        change(transport.rank, denoiser)
        found = euler(Loop(denoiser, network, clock), name, given)
        denoiser.finish()
        denoiser.restore()
        return found

    return raised_or(on_threads(2, on_rank, deadline=DEADLINE))


def raised_or(found: list[Any]) -> list[Any]:
    """What ranks returned. Raises the first rank's error."""
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found
