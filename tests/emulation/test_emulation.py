"""The oracle of stale and partial exchange: exact where all is fresh, itself where the definitions say so.

All in double precision, so that "equal" leaves no room for an approximation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.emulation import EmulatedPolicy, Emulation
from tests.breadth import first_of
from tests.exact import denoisers
from tests.tensors import relative

SAME, DIFFERS = 1e-10, 1e-4
EVEN, UNEVEN, WIDE = (16, 8), (19, 9), (9, 19)
STALE = (
    EmulatedPolicy(halo="stale"),
    EmulatedPolicy(moments="stale"),
    EmulatedPolicy(moments="corrected"),
    EmulatedPolicy(context="all"),
    EmulatedPolicy(context="band"),
    EmulatedPolicy(context="pooled"),
    EmulatedPolicy(context="partials"),
    EmulatedPolicy(halo="stale", moments="corrected", context="all"),
)
EVERYTHING = EmulatedPolicy(halo="stale", moments="corrected", context="all")


def title(policy: EmulatedPolicy) -> str:
    return f"{policy.halo}-{policy.moments}-{policy.context}{'-frozen' * policy.frozen}"


def build(name: str) -> nn.Module:
    return denoisers.build(name).double()


def at_step(name: str, size: tuple[int, int], step: int) -> dict[str, Any]:
    """The latent changes from step to step, as it does while denoising."""
    call = tree_map_only(Tensor, lambda x: x.double(), denoisers.call(name, *size))
    noise = torch.randn(call["sample"].shape, generator=torch.Generator().manual_seed(step))
    return call | {"sample": call["sample"] + 0.2 * step * noise}


@torch.no_grad()
def predictions(denoiser: nn.Module, name: str, size: tuple[int, int], steps: Sequence[int]) -> list[Tensor]:
    return [denoiser(**at_step(name, size, step))[0] for step in steps]


def plain(name: str, size: tuple[int, int], steps: Sequence[int]) -> list[Tensor]:
    return predictions(build(name), name, size, steps)


def emulated(
    policy: EmulatedPolicy, name: str, size: tuple[int, int], steps: Sequence[int], *, ranks: int = 3
) -> list[Tensor]:
    denoiser = build(name)
    with Emulation(denoiser, ranks, policy, split="rows" if size[0] >= size[1] else "columns"):
        return predictions(denoiser, name, size, steps)


@pytest.mark.parametrize("name", first_of(denoisers.KINDS, "sdxl", "asymmetric"))
@pytest.mark.parametrize(("size", "ranks"), first_of([(EVEN, 2), (UNEVEN, 3), (WIDE, 3)], (UNEVEN, 3), (WIDE, 3)))
def test_all_fresh_is_the_plain_unet(name: str, size: tuple[int, int], ranks: int) -> None:
    if not denoisers.KINDS[name].odd:
        size = (size[0] // 4 * 4, size[1] // 4 * 4)
    got = emulated(EmulatedPolicy(warmup_steps=0), name, size, (0, 1), ranks=ranks)
    assert max(map(relative, got, plain(name, size, (0, 1)))) <= SAME


@pytest.mark.parametrize("size", [UNEVEN, pytest.param(WIDE, marks=pytest.mark.breadth)])
@pytest.mark.parametrize(
    "policy",
    [
        *first_of(STALE, EVERYTHING),
        *first_of(
            [
                EmulatedPolicy(halo="none"),
                EmulatedPolicy(moments="separate"),
                EmulatedPolicy(context="none"),
                EmulatedPolicy(frozen=True),
            ],
            EmulatedPolicy(moments="separate"),
        ),
    ],
    ids=title,
)
def test_exact_in_the_warm_up_and_not_after(policy: EmulatedPolicy, size: tuple[int, int]) -> None:
    want = plain("sdxl", size, (0, 1, 2))
    got = emulated(replace(policy, warmup_steps=2), "sdxl", size, (0, 1, 2))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert relative(got[2], want[2]) >= DIFFERS


@pytest.mark.parametrize(
    "name", first_of(["svd", "motion", "unet3d", "asymmetric", "resizing_resnets", "wide"], "wide")
)
def test_stale_matters_in_every_kind(name: str) -> None:
    size = (16, 12)
    got = emulated(EVERYTHING, name, size, (0, 1))
    assert relative(got[1], plain(name, size, (1,))[0]) >= DIFFERS


@pytest.mark.parametrize("policy", first_of(STALE, EVERYTHING), ids=title)
def test_frozen_is_stale_at_first_and_older_then(policy: EmulatedPolicy) -> None:
    """What a policy has fresh is not sent either, so that only where everything is stale the first step is alike."""
    stale = emulated(policy, "sd", UNEVEN, (0, 1, 2))
    frozen = emulated(replace(policy, frozen=True), "sd", UNEVEN, (0, 1, 2))
    assert relative(frozen[2], stale[2]) >= DIFFERS
    if policy == EVERYTHING:
        assert torch.equal(frozen[1], stale[1])
    else:
        assert relative(frozen[1], stale[1]) >= DIFFERS


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        (EmulatedPolicy(context="band", fraction=1), 2),
        (EmulatedPolicy(context="pooled", pool=1), 3),
        (EmulatedPolicy(context="partials", refresh=1), 3),
    ],
    ids=["band of whole neighbours", "windows of one token", "refreshed at every step"],
)
@pytest.mark.parametrize("size", [UNEVEN, pytest.param(WIDE, marks=pytest.mark.breadth)])
def test_contexts_that_leave_nothing_out(policy: EmulatedPolicy, ranks: int, size: tuple[int, int]) -> None:
    got = emulated(policy, "sdxl", size, (0, 1, 2), ranks=ranks)
    want = emulated(EmulatedPolicy(context="all"), "sdxl", size, (0, 1, 2), ranks=ranks)
    assert max(map(relative, got, want)) <= SAME


@pytest.mark.parametrize(
    "policy",
    [
        EmulatedPolicy(context="band", fraction=1),
        EmulatedPolicy(context="pooled", pool=2),
        EmulatedPolicy(context="partials", refresh=2),
    ],
    ids=title,
)
def test_contexts_that_leave_something_out(policy: EmulatedPolicy) -> None:
    got = emulated(policy, "sdxl", UNEVEN, (0, 1, 2))
    want = emulated(EmulatedPolicy(context="all"), "sdxl", UNEVEN, (0, 1, 2))
    assert relative(got[2], want[2]) >= DIFFERS


def test_layers_take_turns_at_refreshing() -> None:
    """Layer k at evaluations with (evaluation + k) % refresh == 0, so at each evaluation other layers."""
    denoiser, renewed = build("sdxl"), []
    with Emulation(denoiser, 2, EmulatedPolicy(context="partials", refresh=3)) as emulation:
        before: dict[str, Any] = {}
        for step in range(4):
            predictions(denoiser, "sdxl", EVEN, (step,))
            kept = emulation.partials
            renewed.append([number for number, path in enumerate(kept) if kept[path] is not before.get(path)])
            before = dict(kept)
    layers = len(before)
    assert layers > 3
    assert renewed[0] == list(range(layers))
    assert renewed[1:] == [[k for k in range(layers) if (step + k) % 3 == 0] for step in (1, 2, 3)]


@pytest.mark.parametrize(
    "policy", first_of([t for t in STALE if t.context in ("fresh", "all", "partials")], EVERYTHING), ids=title
)
def test_where_nothing_changes_stale_is_fresh(policy: EmulatedPolicy) -> None:
    got = emulated(policy, "sdxl", UNEVEN, (1, 1, 1))
    assert relative(got[2], plain("sdxl", UNEVEN, (1,))[0]) <= SAME


def test_an_image_begins_with_nothing_of_the_last() -> None:
    denoiser = build("sd")
    with Emulation(denoiser, 2, EVERYTHING) as emulation:
        first = predictions(denoiser, "sd", EVEN, (0, 1))
        on = predictions(denoiser, "sd", EVEN, (0, 1))
        emulation.reset()
        again = predictions(denoiser, "sd", EVEN, (0, 1))
        with pytest.raises(ValueError, match="reset"):
            predictions(denoiser, "sd", UNEVEN, (0,))
        emulation.reset()
        predictions(denoiser, "sd", UNEVEN, (0,))
    assert all(map(torch.equal, first, again))
    assert relative(on[0], first[0]) >= DIFFERS


def test_leaves_the_unet_as_it_was() -> None:
    denoiser = build("unconditional")
    attributes = {path: sorted(vars(module)) for path, module in denoiser.named_modules()}
    before = predictions(denoiser, "unconditional", EVEN, (0,))
    emulation = Emulation(denoiser, 2, EmulatedPolicy(halo="stale", context="partials"))
    with emulation:
        predictions(denoiser, "unconditional", EVEN, (0, 1))
        assert emulation.cache
        assert emulation.partials
    assert not emulation.cache
    assert not emulation.partials
    assert {path: sorted(vars(module)) for path, module in denoiser.named_modules()} == attributes
    assert torch.equal(predictions(denoiser, "unconditional", EVEN, (0,))[0], before[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"halo": "corrected"},
        {"moments": "none"},
        {"context": "stale"},
        {"fraction": 0},
        {"band": 1.5},
        {"pool": 0},
        {"refresh": 0},
        {"halo": "stale", "warmup_steps": 0},
    ],
    ids=str,
)
def test_refuses_what_is_no_policy(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "warmup_steps" not in wrong else "warmup_steps"):
        EmulatedPolicy(**wrong)


def test_refuses_too_few_ranks() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Emulation(build("sd"), 1, EmulatedPolicy())
