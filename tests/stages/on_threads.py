"""A network in stages of several ranks, each rank a thread of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Mesh
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.layout import StageLayout
from patchpar.shard.stages.patches import StagedPatches
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch
from tests.stages.on_ranks import built, held
from tests.tokens.ranks import predictions
from tests.unit.threads import on_threads
from tests.weights.on_ranks import same_state, state_of

DEADLINE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRank:
    """The predictions of three equal calls, what was sent in the last one, and the part of the weights held then.

    `carried`: bytes that the rank hands over to the next stage by its layout; `whole`: those of the whole image.
    """

    predictions: list[Tensor]
    sent: dict[str, int]
    held: float
    restored: bool
    carried: int
    whole: int


def in_stages(name: str, stages: int, patches: int, folder: Path, exchange: str) -> list[OfRank]:
    """Stages of patches; with one stage the patches alone. `exchange`: "on", or what is off, "stages" or "patches"."""
    world = stages * patches
    made = [built(name) for _ in range(world)]  # threads share torch's random state

    @torch.no_grad()
    def on_rank(transport: Any) -> OfRank:
        (network, call), comm = made[transport.rank], Communicator(transport)
        mesh = Mesh(transport.rank, range(world), stage=stages, patch=patches)
        denoiser: Any = divided(network, comm, mesh, VerificationCache(folder / str(transport.rank)))
        before, whole = state_of(network), held(network)
        if exchange == "stages":
            denoiser.stages.exchange = "off"
        elif exchange == "patches":
            denoiser.patched.exchange = "off"
        found = []
        for _ in range(3):
            comm.traffic.clear()
            denoiser.reset()
            found.append(predictions(denoiser.denoise(network.forward, **call()))[0].clone())
        sent, part = {kind: count for kind, count in comm.traffic.bytes_sent.items() if count}, held(network) / whole
        carried = [carried_by(layout, mesh["stage"].rank) for layout in layouts_of(denoiser)] or [0, 0]
        denoiser.restore()
        restored = same_state(network, before)
        return OfRank(predictions=found, sent=sent, held=part, restored=restored, carried=carried[0], whole=carried[1])

    with patch("patchpar.shard.stages.denoiser.seconds_of_blocks", return_value=[]):  # threads measure one another
        found = on_threads(world, on_rank, deadline=DEADLINE)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def divided(network: nn.Module, comm: Communicator, mesh: Mesh, cache: VerificationCache | None) -> Any:
    """A network in the stages and patches of a mesh."""
    patched = ExactPatch().install(network, comm, mesh["patch"], verifications=cache)
    if mesh["stage"].size == 1:
        return patched
    return StagedPatches(patched, StagedDenoiser(network, (comm, mesh["stage"]), cache), (comm, mesh.of_one_branch()))


def layouts_of(denoiser: Any) -> list[StageLayout]:
    """How calls on patches are divided, and whole ones; none without stages."""
    if not isinstance(denoiser, StagedPatches):
        return []
    return [*denoiser._known[0][1], *denoiser.stages._layouts[0][1]]


def carried_by(layout: StageLayout, stage: int) -> int:
    """Bytes of the outputs that a stage hands over to the next."""
    return sum(spec.num_bytes for number in layout.carried_out(stage) for spec in layout.calls[number].form.specs)
