"""Group norm with moments of the last step, two ranks as threads, against the definitions in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.emulation.sight import corrected, merged, moments_of, normalise
from patchpar.comm.collectives import Communicator
from patchpar.plan.bands import Bands
from patchpar.plan.exchange_policy import GROUP_NORMS, LEAST_VARIANCE
from patchpar.plan.mesh import Mesh
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.stale.cache import StaleCache
from patchpar.shard.unet.layer_hooks import NormHook
from patchpar.strategies.displaced import DisplacedPatch
from tests.unit.threads import on_threads

GROUPS, ROWS = 2, (6, 2)
Maps = Callable[[int, int], Tensor]  # by evaluation and place


def normalised(
    transport: Any, group_norm: Any, norm: nn.GroupNorm, maps: Maps, preset: Any = None, rows: int = 6
) -> list[Tensor]:
    """Our rows of an exact evaluation and three stale ones."""
    comm, policy = Communicator(transport), DisplacedPatch(group_norm=group_norm, preset=preset).policy
    memory, bands = StaleCache(comm, policy.bucket), Bands((0, rows, 8))
    part = LocalPatch(comm, Mesh(transport.rank, range(2), patch=2)["patch"], policy, bands, cache=memory)
    hook, found = NormHook(part, "norm", None), []
    for evaluation in range(4):
        part.fresh = not memory.begin(0, evaluation, "form")
        found.append(hook.new_forward(norm, maps(evaluation, transport.rank)))
        memory.end()
    memory.settle()
    return found


def wanted(group_rank: int, group_norm: str, norm: nn.GroupNorm, maps: Maps) -> list[Tensor]:
    """By definition."""
    found = []
    for evaluation in range(4):
        now, then = ([moments_of(maps(max(0, e), p), GROUPS) for p in (0, 1)] for e in (evaluation, evaluation - 1))
        seen = {
            "sync": merged(now),
            "separate": now[group_rank],
            "stale": merged([now[group_rank], then[1 - group_rank]]),
            "corrected": None,
            "guarded": None,
        }[group_norm if evaluation else "sync"]
        if seen is None:
            mean, variance = corrected(merged(then), then[group_rank], now[group_rank], LEAST_VARIANCE[group_norm])
        else:
            mean, variance = seen.mean_BG, seen.variance_BG
        found.append(normalise(norm, maps(evaluation, group_rank).double(), mean, variance))
    return found


def check(group_norm: str, maps: Maps, tolerance: float) -> Sequence[Any]:
    torch.manual_seed(0)
    norm = nn.GroupNorm(GROUPS, 8).requires_grad_(False)
    nn.init.normal_(norm.weight, 1.0, 0.2)
    ranks = on_threads(2, normalised, group_norm, norm, maps)
    for group_rank, got in enumerate(ranks):
        for one, want in zip(got, wanted(group_rank, group_norm, norm, maps), strict=True):
            assert one.isfinite().all()
            assert one.dtype == maps(0, 0).dtype
            assert (one.double() - want).abs().max() <= tolerance * want.abs().max()
    return ranks


def noise(evaluation: int, group_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * evaluation + group_rank)
    return torch.randn(1, 8, ROWS[group_rank], 5, generator=generator)


@pytest.mark.parametrize("group_norm", GROUP_NORMS)
def test_by_definition(group_norm: str) -> None:
    ranks = check(group_norm, lambda e, p: 3 * p + noise(e, p), 1e-5)
    others = on_threads(2, normalised, "sync" if group_norm != "sync" else "stale", nn.GroupNorm(GROUPS, 8), noise)
    assert (others[0][-1] - ranks[0][-1]).norm() > 1e-2 * ranks[0][-1].norm()


@pytest.mark.parametrize("group_norm", GROUP_NORMS)
@pytest.mark.parametrize(("mean", "std"), [(300, 1), (300, 80), (6e4, 30), (-5.9e4, 1000), (0, 1.4e4)])
def test_half_precision_does_not_overflow(group_norm: str, mean: float, std: float) -> None:
    """The square of 256 is beyond fp16."""
    check(group_norm, lambda e, p: (mean + std * noise(e, p)).clamp(-6.5e4, 6.5e4).half(), 2e-2)


def test_a_negative_corrected_variance_is_replaced_by_our_own() -> None:
    """We varied much, the other one little; now we vary little: more is taken away than there was."""

    def maps(evaluation: int, group_rank: int) -> Tensor:
        return noise(evaluation, group_rank) * (10.0 if (evaluation, group_rank) == (0, 1) else 0.1)

    then, now = ([moments_of(maps(evaluation, group_rank), GROUPS) for group_rank in (0, 1)] for evaluation in (0, 1))
    square = merged(then).square_BG + now[1].square_BG - then[1].square_BG
    mean = merged(then).mean_BG + now[1].mean_BG - then[1].mean_BG
    assert (square - mean.square() < 0).all(), "the case is not what it is meant to be"
    check("corrected", maps, 1e-4)


def test_a_corrected_variance_next_to_nothing_is_believed_unless_guarded() -> None:
    """What is left is positive, and a tenth of ours: the paper's guard lets it pass, and it blows the map up."""

    def maps(evaluation: int, group_rank: int) -> Tensor:
        base = noise(0, group_rank)  # the same values again and again, smaller: so that the case can be worked out
        base = base - base.mean()
        size = {(0, 0): 0.2, (0, 1): 1.0}.get((evaluation, group_rank), 0.2 if group_rank == 0 else 0.906)
        return base * size

    then, now = ([moments_of(maps(evaluation, group_rank), GROUPS) for group_rank in (0, 1)] for evaluation in (0, 1))
    left = merged(then).square_BG + now[1].square_BG - then[1].square_BG
    left -= (merged(then).mean_BG + now[1].mean_BG - then[1].mean_BG).square()
    part = left / now[1].variance_BG
    assert ((part > 0) & (part < LEAST_VARIANCE["guarded"])).all(), f"the case is not what it is meant to be: {part}"
    believed, guarded = (check(group_norm, maps, 1e-4)[1][1] for group_norm in ("corrected", "guarded"))
    assert believed.abs().max() > 1.5 * guarded.abs().max()


def published(group_rank: int, group_norm: str, norm: nn.GroupNorm, maps: Maps, evaluation: int) -> Tensor:
    """What DistriFusion's code computes in a stale step (arXiv:2402.19481, section 4.3), from means of squares.

    Every patch of rows counts the same. Where the estimated variance is negative it is that of the own patch; then it
    is multiplied by N/(N - 1), where N counts the values of a group in the own patch.
    """
    x_BGn = [maps(evaluation, p).double().reshape(1, GROUPS, -1) for p in (0, 1)]
    old_BGn = [maps(evaluation - 1, p).double().reshape(1, GROUPS, -1) for p in (0, 1)]
    now, then = ([(x.mean(-1), x.square().mean(-1)) for x in each] for each in (x_BGn, old_BGn))
    seen = [now[p] if p == group_rank and group_norm == "stale" else then[p] for p in (0, 1)]
    moved = [now[group_rank][i] - then[group_rank][i] if group_norm == "corrected" else 0.0 for i in (0, 1)]
    mean, square = ((seen[0][i] + seen[1][i]) / 2 + moved[i] for i in (0, 1))
    variance = square - mean.square()
    if group_norm == "corrected":
        variance = torch.where(variance < 0, now[group_rank][1] - now[group_rank][0].square(), variance)
    count = x_BGn[group_rank].shape[-1]
    return normalise(norm, maps(evaluation, group_rank).double(), mean, variance * count / (count - 1))


def even(evaluation: int, group_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * evaluation + group_rank)
    return 0.3 * group_rank + torch.randn(1, 8, 4, 5, generator=generator)


def turning_negative(evaluation: int, group_rank: int) -> Tensor:
    """A place that varied much varies little: more is taken away than there was."""
    return even(evaluation, group_rank) * (10.0 if (evaluation % 2, group_rank) == (0, 1) else 0.1)


@pytest.mark.parametrize("group_norm", ["corrected", "stale"])
@pytest.mark.parametrize("maps", [even, turning_negative])
def test_the_preset_of_the_paper_is_the_published_algorithm(group_norm: str, maps: Maps) -> None:
    norm = nn.GroupNorm(GROUPS, 8).requires_grad_(False)
    nn.init.normal_(norm.weight, 1.0, 0.2)
    found, ours = (on_threads(2, normalised, group_norm, norm, maps, preset, 4) for preset in ("paper", None))
    for group_rank in (0, 1):
        for evaluation in (1, 2, 3):
            want = published(group_rank, group_norm, norm, maps, evaluation)
            got, plain = found[group_rank][evaluation], ours[group_rank][evaluation]
            assert (got.double() - want).norm() <= 1e-5 * want.norm(), (group_rank, evaluation)
            assert (plain.double() - want).norm() >= 1e-3 * want.norm(), "without the preset it is another"


def test_that_negative_variances_are_among_those_cases() -> None:
    then, now = ([moments_of(turning_negative(e, p), GROUPS) for p in (0, 1)] for e in (0, 1))
    square = merged(then).square_BG + now[1].square_BG - then[1].square_BG
    mean = merged(then).mean_BG + now[1].mean_BG - then[1].mean_BG
    assert (square - mean.square() < 0).all()
