"""Keys and values that a rank remembers of pieces: after several exact steps, and where another image begins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchpar.plan.exchange_policy import Correction, StaleKV
from patchpar.shard.piped.piece_memory import PieceMemory, RememberedParts
from patchpar.shard.stale.token_slots import TokenSlots
from patchpar.shard.stale.workspace import Workspace
from tests.tensors import noise, relative

TEXT, PIECES, WIDTH = 2, 3, 8
COUNTS = (5, 4, 4)
TOKENS = TEXT + sum(COUNTS)
ONE = torch.ones(())
LIMIT = 1e-5


def at(time: int) -> Tensor:
    """Tokens [T, 2, B, N, D] of a step: they move along a straight line, each its own way."""
    return noise(TOKENS, 2, 1, 2, WIDTH) + time * noise(TOKENS, 2, 1, 2, WIDTH, seed=1)


def keys_values(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, l, N, D] of tokens."""
    key, value = tokens.transpose(0, 1).transpose(1, 2).unbind(0)
    return key, value


def memory(correction: Correction) -> PieceMemory:
    slots, options = TokenSlots(COUNTS, TEXT), StaleKV(extrapolated=True, correction=correction)
    return PieceMemory(slots, [(0, count) for count in COUNTS], (2, 1, 2, WIDTH), options, at(0), Workspace())


def remembered(memory: PieceMemory, *times: int) -> PieceMemory:
    """After exact steps of one image."""
    for number, time in enumerate(times):
        memory.remember(*keys_values(at(time)), continues=number > 0)
    return memory


def attended(memory: PieceMemory, piece: int, time: int) -> Tensor:
    """What a piece attends to in a step as long as the last one."""
    start = TEXT + sum(COUNTS[:piece])
    own = torch.cat([at(time)[:TEXT], at(time)[start : start + COUNTS[piece]]])
    return memory.write(piece, *keys_values(own), ONE).clone()


@pytest.mark.parametrize("correction", ["none", "affine"])
def test_pieces_go_on_along_the_line_of_the_last_two_steps(correction: Correction) -> None:
    """Of exact ones, and then of those in pieces."""
    known = remembered(memory(correction), 0, 1, 2)
    for time in (3, 4):
        for piece in range(PIECES):
            assert relative(attended(known, piece, time), at(time)) <= LIMIT


def test_an_image_that_begins_has_no_line_of_the_last_one() -> None:
    known = remembered(memory("none"), 0, 1)
    later = attended(remembered(known, 5), 0, 6)[TEXT + COUNTS[0] :]
    assert torch.equal(later, at(5)[TEXT + COUNTS[0] :])


def test_parts_that_are_joined_stay_what_they_were() -> None:
    """Networks write to the tensors that they have joined."""
    known, tensor = RememberedParts("norm"), noise(4, WIDTH)
    before = tensor.clone()
    known.remember(0, 0, tensor.split(2))
    tensor.zero_()
    assert torch.equal(torch.cat(known.of(0, 0)), before)
