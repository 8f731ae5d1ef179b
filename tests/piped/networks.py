"""Tiny transformers computed in pieces, step by step, and what the pieces should be by the definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import map_leaves
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.sdpa import AttentionCall, SdpaMode
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.piped import PipedStages
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.tokens.nobody import Nobody
from tests.tokens.ranks import predictions

LIMIT = 1e-5


def call(name: str, step: int) -> dict[str, Any]:
    """The call of a step: tokens that move along a line, with some noise, as those of an image do; and its time."""
    tiny = TRANSFORMERS[name]
    given = tiny.call(0)

    def moved(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(step))
        return x + 0.1 * step * x.flip(1) + 0.02 * noise

    return given | {tiny.tokens: map_leaves(moved, given[tiny.tokens])}


class Loop:
    """A network in pieces, without a pipeline: one call for each step."""

    def __init__(self, denoiser: Any, network: nn.Module, clock: StepClock) -> None:
        self.denoiser, self._network, self._clock = denoiser, network, clock

    @torch.no_grad()
    def run(self, calls: Sequence[dict[str, Any]]) -> list[Tensor]:
        """The first prediction of every step of an image."""
        found = [self.prediction(calls[step]).clone() for step in self.steps(len(calls))]
        self.denoiser.finish()
        return found

    def steps(self, count: int) -> Iterator[int]:
        """The steps of an image."""
        self._clock.reset()
        self.denoiser.reset()
        for step in range(count):
            self._clock.next_call()
            yield step
            self._clock.tick()

    def prediction(self, given: dict[str, Any]) -> Tensor:
        """The first prediction of a call."""
        return predictions(self.denoiser.denoise(self._network.forward, **given))[0]


def here(name: str, strategy: PipedStages, folder: Path, network: nn.Module | None = None) -> Loop:
    """A network in pieces on one rank. `folder`: where verifications are kept."""
    network, clock = network or TRANSFORMERS[name].build(), StepClock()
    comm, cache = Communicator(Nobody(0, "cpu")), VerificationCache(folder / "here")
    return Loop(strategy.install(network, comm, Axis("stage"), clock=clock, verifications=cache), network, clock)


@torch.no_grad()
def plain(name: str, given: dict[str, Any]) -> Tensor:
    """The first prediction of the network itself."""
    return predictions(TRANSFORMERS[name].build()(**given))[0]


def errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """The relative error of every step."""
    return [relative(x, y) for x, y in zip(found, wanted, strict=True)]


class ByDefinition:
    """Pieces of a network with joint attention, text first, each computed by a forward of the whole network.

    In the pass of a piece all keys of other pieces are those remembered, so that its own rows are right.
    """

    def __init__(self, name: str, pieces: int) -> None:
        self._name, self._pieces = name, pieces
        self._tokens = TRANSFORMERS[name].call(0)[TRANSFORMERS[name].tokens].shape[1]
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def run(self, calls: Sequence[dict[str, Any]]) -> list[Tensor]:
        """The prediction [B, S, C] of every step, the first of which is exact."""
        network, found = TRANSFORMERS[self._name].build(), []
        for step, each in enumerate(calls):
            passes = [self._passed(network, each, piece if step else None) for piece in range(self._pieces)]
            parts = [x[:, slice(*self._rows(piece))] for piece, x in enumerate(passes)]
            found.append(torch.cat(parts, 1))
        return found

    def _rows(self, piece: int) -> tuple[int, int]:
        each, more = divmod(self._tokens, self._pieces)
        start = each * piece + min(piece, more)
        return start, start + each + (piece < more)

    def _passed(self, network: nn.Module, given: dict[str, Any], piece: int | None) -> Tensor:
        """The network's prediction, of which the rows of that piece are right; None: all of them."""
        number = iter(range(1000))
        start, stop = (0, self._tokens) if piece is None else self._rows(piece)

        def attend(asked: AttentionCall) -> Tensor:
            layer, mixed = next(number), []
            text = asked.key.shape[2] - self._tokens
            kept = self._kept.get(layer, (asked.key[:, :, text:], asked.value[:, :, text:]))
            for x, old in zip((asked.key, asked.value), kept, strict=True):
                image = old.clone()
                image[:, :, start:stop] = x[:, :, text + start : text + stop]
                mixed.append(image)
            self._kept[layer] = (mixed[0], mixed[1])
            key, value = (
                torch.cat([x[:, :, :text], y], 2) for x, y in zip((asked.key, asked.value), mixed, strict=True)
            )
            return AttentionCall(asked.query, key, value, asked.attn_mask, scale=asked.scale).run()

        with SdpaMode(attend):
            return predictions(network(**given))[0]
