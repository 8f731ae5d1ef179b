"""What plain diffusers gives for the same seed, two workers give, whatever the arguments of the call."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline
from tests.breadth import first_of

from .conftest import EXACT, QUICK, generator, relative_error, tensor_of

PLANS = ("cfg=2", "patch=2")
TWO = {"prompt": ["a small red house", "a blue tower"], "negative_prompt": ["grey", "dark"]}
CALLS: dict[str, Any] = {
    "one generator": lambda: {"generator": generator()},
    "a list of generators": lambda: {"generator": [generator(1), generator(2)], "num_images_per_prompt": 2},
    "one generator twice in a list": lambda: {"generator": [generator(1)] * 2, "num_images_per_prompt": 2},
    "several pictures": lambda: {"generator": generator(), "num_images_per_prompt": 2},
    "lists of prompts": lambda: {**TWO, "generator": [generator(3), generator(4)]},
    "strong guidance": lambda: {"generator": generator(), "guidance_scale": 9.0, "guidance_rescale": 0.3},
    "given latents": lambda: {"latents": torch.randn(1, 4, 16, 16, generator=generator())},
    "a picture that is no square": lambda: {"generator": generator(), "height": 136, "width": 120},
    "ready embeddings": lambda: {
        "prompt": None,
        "prompt_embeds": torch.randn(1, 77, 64, generator=generator(1)),
        "negative_prompt_embeds": torch.randn(1, 77, 64, generator=generator(2)),
        "pooled_prompt_embeds": torch.randn(1, 32, generator=generator(3)),
        "negative_pooled_prompt_embeds": torch.randn(1, 32, generator=generator(4)),
        "generator": generator(),
    },
}


@pytest.mark.parametrize("plan", first_of(PLANS, "patch=2"))
@pytest.mark.parametrize("name", CALLS)
def test_the_same_latents(parallel: ParallelPipeline, plain: Any, plan: str, name: str) -> None:
    parallel.plan = plan
    call = {**QUICK, "output_type": "latent"}
    got = parallel(**{**call, **CALLS[name]()})
    want = plain(**{**call, **CALLS[name]()})
    assert relative_error(got, want) <= EXACT
    assert parallel.last_run is not None
    assert parallel.last_run.steps == 2
    assert min(parallel.last_run.bytes_per_step) > 0


@pytest.mark.parametrize(
    ("kind", "return_dict"),
    first_of(product(["pil", "np", "pt", "latent"], [True, False]), ("pil", True), ("pt", False), ("latent", False)),
)
def test_the_same_output_class(parallel: ParallelPipeline, plain: Any, kind: str, return_dict: bool) -> None:
    call = {**QUICK, "output_type": kind, "return_dict": return_dict}
    got, want = parallel(**call, generator=generator()), plain(**call, generator=generator())
    assert type(got) is type(want)
    first = (got[0], want[0]) if not return_dict else (got.images, want.images)
    assert type(first[0]) is type(first[1])
    if kind == "pil":  # whole levels: rounding may fall to either side
        assert (tensor_of(got) - tensor_of(want)).abs().max() <= 1.01 / 255
    else:
        assert relative_error(got, want) <= EXACT


def test_without_guidance(parallel: ParallelPipeline, plain: Any) -> None:
    call = {**QUICK, "output_type": "latent", "guidance_scale": 1.0}
    got, want = parallel(**call, generator=generator()), plain(**call, generator=generator())
    assert str(parallel.plan) == "patch=2,strategy=exact"
    assert relative_error(got, want) <= EXACT


def test_arguments_by_position(parallel: ParallelPipeline, plain: Any) -> None:
    by_position = ("a small red house", "in the snow", 128, 136, 2)
    call = {"generator": generator(), "output_type": "latent"}
    got = parallel(*by_position, **call)
    want = plain(*by_position, **{**call, "generator": generator()})
    assert tensor_of(got).shape[-2:] == (16, 17)
    assert relative_error(got, want) <= EXACT


@pytest.mark.parametrize("plan", first_of(PLANS, "patch=2"))
def test_the_callers_generators_move_on(parallel: ParallelPipeline, plain: Any, plan: str) -> None:
    parallel.plan = plan
    ours, theirs = generator(7), generator(7)
    for _ in range(2):  # the second call starts where the first one ended
        got = parallel(**QUICK, generator=ours, output_type="latent")
        want = plain(**QUICK, generator=theirs, output_type="latent")
        assert relative_error(got, want) <= EXACT
        assert torch.equal(ours.get_state(), theirs.get_state())
    lists = [[generator(seed) for seed in (1, 2)] for _ in range(2)]
    for pipe, generators in zip((parallel, plain), lists, strict=True):
        pipe(**QUICK, generator=generators, num_images_per_prompt=2, output_type="latent")
    assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(*lists, strict=True))


def test_torchs_own_random_numbers_move_on(parallel: ParallelPipeline, plain: Any) -> None:
    found = []
    for pipe in (parallel, plain):
        torch.manual_seed(11)
        images = [tensor_of(pipe(**QUICK, output_type="latent")) for _ in range(2)]
        found.append((*images, torch.rand(3)))
    for got, want in zip(*found, strict=True):
        assert ((got - want).norm() / want.norm()).item() <= EXACT
    assert not torch.allclose(found[0][0], found[0][1])


def test_a_generator_leaves_torchs_own_random_numbers_alone(parallel: ParallelPipeline) -> None:
    torch.manual_seed(12)
    before = torch.get_rng_state()
    parallel(**QUICK, generator=generator(), output_type="latent")
    assert torch.equal(torch.get_rng_state(), before)


def test_two_data_groups(parallel: ParallelPipeline, plain: Any) -> None:
    parallel.plan = "data=2"
    ours, theirs = [generator(1), generator(2)], [generator(1), generator(2)]
    call = {**QUICK, **TWO, "output_type": "latent"}
    got, want = parallel(**call, generator=ours), plain(**call, generator=theirs)
    assert relative_error(got, want) <= EXACT
    assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(ours, theirs, strict=True))
    one, other = generator(5), generator(5)
    assert relative_error(parallel(**call, generator=one), plain(**call, generator=other)) <= EXACT
    assert torch.equal(one.get_state(), other.get_state())


def test_without_exchange_the_comparison_fails(parallel: ParallelPipeline, plain: Any) -> None:
    parallel.plan = "patch=2"
    call = {**QUICK, "output_type": "latent"}
    want = plain(**call, generator=generator())
    assert relative_error(parallel(**call, generator=generator()), want) <= EXACT
    parallel._executor.call("control", exchange="off")
    try:
        assert relative_error(parallel(**call, generator=generator()), want) > 100 * EXACT
    finally:
        parallel._executor.call("control", exchange="on")
    assert relative_error(parallel(**call, generator=generator(9)), want) > 100 * EXACT
