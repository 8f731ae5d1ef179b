"""Several denoiser calls in a step, calls without end, calls that fail; and what is held from one to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.breadth import first_of
from tests.exact import denoisers

from .runs import Run, arguments, emulated, errors

ON_RANKS = "tests.stale.on_ranks"
SAME = 1e-5
DISPLACED, EDGES, GUARDED = "displaced:warmup_steps=1", "fresh-edges", "pcpp:group_norm=guarded"
PAPER = f"{DISPLACED},preset=paper"


@pytest.mark.parametrize(
    "strategy",
    first_of(
        [DISPLACED, "fresh-edges:context=pooled,pool=2", f"{GUARDED},warmup_steps=2"], f"{GUARDED},warmup_steps=2"
    ),
)
def test_a_call_for_each_branch_of_guidance(ranks: Any, strategy: str) -> None:
    """Each uses the last step's values of its own branch, and is exact where that branch has just paused."""
    run = Run(strategy=strategy, evaluations=6)
    first, second = ranks.run(f"{ON_RANKS}:called_twice", 3, run, 3)[0]
    assert max(errors(first, emulated(run, 3))) <= SAME
    other = replace(run, branch=1)
    if "warmup_steps=2" in strategy:  # evaluation 4 is exact for the pause alone, which is a warm-up of 1
        after = emulated(replace(other, strategy=f"{GUARDED},warmup_steps=1"), 3, (4, 5))
    else:
        after = emulated(other, 3, (4, 5))
    assert max(errors(second, [*emulated(other, 3, (0, 1, 2)), *after])) <= SAME
    assert errors(second[:3], first[:3])[-1] > 100 * SAME
    assert errors(second[3:4], emulated(other, 3, (0, 1, 2, 4))[3:])[-1] > 10 * SAME


@pytest.mark.parametrize("evaluations", [1, 4])
def test_a_budget_counts_all_that_is_sent(ranks: Any, evaluations: int) -> None:
    """The prediction too, which is sent with the report on what was sent."""
    for reported, counted in ranks.run(
        f"{ON_RANKS}:reported", 3, Run(strategy="fresh-edges:budget=1", evaluations=evaluations)
    ):
        assert reported == counted > 0


def test_calls_without_a_step_are_refused(ranks: Any) -> None:
    for number, message in ranks.run(f"{ON_RANKS}:called_without_end", 2, Run(strategy=EDGES, size=(8, 8))):
        assert number == 16
        assert message.startswith("UnsupportedModel: the denoiser has been called 17 times without a scheduler step")
        assert "use strategy 'exact'" in message


@pytest.mark.breadth
@pytest.mark.parametrize("strategy", first_of([DISPLACED, PAPER, "fresh-edges:bits=8"], "fresh-edges:bits=8"))
@pytest.mark.parametrize("layer", first_of(["mid_block.attentions.0", "conv_out"], "conv_out"))
def test_a_call_that_fails_inside_the_denoiser(ranks: Any, strategy: str, layer: str) -> None:
    """Buckets are half full, and messages of this step and the last one are under way."""
    run = Run(strategy=strategy)
    assert ranks.run(f"{ON_RANKS}:interrupted", 3, run, layer) == [[True] * run.evaluations] * 3


HELD = ("fresh-edges", "fresh-edges:context=pooled,pool=2,bits=4", "displaced", PAPER, "pcpp")


@pytest.mark.parametrize("strategy", first_of(HELD, HELD[1]))
def test_buffers_are_allocated_once_and_nothing_grows(ranks: Any, strategy: str) -> None:
    """Six steps, and six of the next image."""
    run = Run(strategy=strategy, size=(16, 8), evaluations=6)
    for where, num_bytes in ranks.run(f"{ON_RANKS}:held", 2, run):
        assert len(where[0]) >= 7  # keys and values of seven layers
        assert all(each == where[0] for each in where)
        assert len(set(num_bytes[3:6])) == 1
        # The first stale step has the moments of all ranks as gathered in the exact one, and this rank's new ones.
        assert max(num_bytes[2:6]) <= 1.05 * num_bytes[5]
        assert num_bytes[8:] == num_bytes[2:6]


def maps_read() -> dict[str, Tensor]:
    """What every convolution of the denoiser "sd" reads, for a latent of 24 x 8."""
    denoiser, found = denoisers.build("sd"), {}
    for path, module in denoiser.named_modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1 and path != "conv_in":
            module.register_forward_pre_hook(lambda _, args, path=path: found.update({path: args[0]}))
    with torch.no_grad():
        denoiser(**arguments(Run(strategy=EDGES, size=(24, 8)), 0))
    return found


KEYS = 4 * 2 * 2 * (3 * 192 * 16 + 3 * 48 * 32 + 12 * 32)
"""Bytes of K and V of the whole image: fp32, batch 2, tokens x channels of seven layers on three levels."""


MEANS = 4 * 2 * 2 * (3 * 16 + 3 * 32 + 32)
"""Bytes of the means of K and V over a place's tokens."""


@pytest.mark.breadth
def test_bytes_held_of_keys(ranks: Any) -> None:
    """Once; where they are led on, the other's half as it came as well; and to tell how ours have changed, ours.

    What attention reads then is in memory that all layers have together: as much as the largest layer needs.
    """
    one = 4 * 2 * 2 * 192 * 16
    for strategy, halves, means in (
        ("fresh-edges:extrapolated=false,correction=none", 2, 0),
        ("fresh-edges:correction=none", 3, 0),
        ("fresh-edges:extrapolated=false", 3, 1),
        ("fresh-edges", 5, 2),
    ):
        shared = 0 if strategy.endswith("false,correction=none") else one
        for _, num_bytes in ranks.run(f"{ON_RANKS}:held", 2, Run(strategy=strategy, size=(24, 8), evaluations=3)):
            assert num_bytes[-1] == halves * KEYS // 2 + means * MEANS + shared, strategy


def test_bytes_held_of_all(ranks: Any) -> None:
    """Keys of all; of each norm moments of two ranks; a row of the neighbour for each convolution that reads one."""
    maps = maps_read()
    row = {path: 4 * x[:, :, 0].numel() for path, x in maps.items()}
    down = sum(num_bytes for path, num_bytes in row.items() if "downsamplers" in path)  # reads none from below
    denoiser = denoisers.build("sd")
    norms = sum(isinstance(module, nn.GroupNorm) for module in denoiser.modules())
    moments = norms * 2 * 4 * (1 + 2 * 2 * 8)
    found = ranks.run(f"{ON_RANKS}:held", 2, Run(strategy=DISPLACED, size=(24, 8), evaluations=4))
    assert found[0][1][-1] == KEYS + moments + sum(row.values()) - down
    assert found[1][1][-1] == KEYS + moments + sum(row.values())
