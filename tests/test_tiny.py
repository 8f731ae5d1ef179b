"""The tiny pipelines are worth testing with: the same everywhere, finite, and guidance changes their result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import tiny
from tests.breadth import first_of
from tests.tiny.copies import BUILDS, Copies
from tests.tiny.weights import enliven, seeded

NAMES = list(tiny.BUILDERS)
WITHOUT_GUIDANCE = {"svd": {"max_guidance_scale": 1.0}} | {
    name: {"true_cfg_scale": 1.0} for name in ("flux", "qwen", "qwen_edit", "hunyuan_video")
}


@pytest.mark.parametrize("name", first_of(NAMES, "sd", "flux", "zimage"))
def test_builds_the_same_weights_every_time_and_leaves_the_random_state_alone(name: str) -> None:
    torch.manual_seed(1)
    first = tiny.build(name)
    state = torch.random.get_rng_state()
    second = tiny.build(name)
    assert torch.equal(state, torch.random.get_rng_state())
    for key, value in first.denoiser.state_dict().items():
        assert torch.equal(value, second.denoiser.state_dict()[key]), key


def storages(value: Any) -> list[Any]:
    return [each.untyped_storage().data_ptr() for each in networks_of(value).state_dict().values()]


def networks_of(value: tiny.Tiny) -> torch.nn.Module:
    parts = {name: part for name, part in value.pipe.components.items() if isinstance(part, torch.nn.Module)}
    return torch.nn.ModuleDict(parts)


@pytest.mark.parametrize("name", first_of([*NAMES, *tiny.RARER], "sd", "zimage"))
def test_a_copy_is_what_is_built_and_shares_nothing(name: str) -> None:
    built = [tiny.build(name) for _ in range(BUILDS)][-1]
    assert tiny.COPIES.has(name)
    copy, want = tiny.build(name), networks_of(built).state_dict()
    found = networks_of(copy).state_dict()
    assert list(found) == list(want)
    assert all(torch.equal(found[key], x) and found[key].stride() == x.stride() for key, x in want.items())
    assert not {*storages(copy)} & {*storages(built)} - {0}
    assert type(copy.pipe.scheduler) is type(built.pipe.scheduler)
    assert copy.pipe.config == built.pipe.config
    for x in found.values():
        x.zero_()
    again = networks_of(tiny.build(name)).state_dict()
    assert all(torch.equal(again[key], x) for key, x in want.items())


def test_tensors_that_share_memory_share_it_in_a_copy() -> None:
    copies = Copies()

    def build() -> dict[str, Any]:
        whole = torch.arange(6.0).reshape(2, 3)
        layer = torch.nn.Linear(3, 3).requires_grad_(False)
        return {"whole": whole, "part": whole[1], "layer": layer, "tied": layer.weight}

    for _ in range(BUILDS):
        copies.of("shared", build)
    found = copies.of("shared", lambda: pytest.fail("it is built again"))
    found["whole"].add_(1)
    assert found["part"].tolist() == [4, 5, 6]
    assert found["tied"] is found["layer"].weight


def test_what_pickle_cannot_write_is_built_every_time() -> None:
    copies, built = Copies(), []

    def build() -> Any:
        built.append(lambda: None)
        return built[-1]

    assert [copies.of("local", build) for _ in range(BUILDS + 2)] == built
    assert len(built) == BUILDS + 2


def test_what_a_model_leaves_uninitialised_is_the_same_every_time() -> None:
    """As diffusers 0.38 leaves the tokens that pad Z-Image's text."""
    found = []
    for _ in range(2):
        torch.full((1, 4096), 7.0)  # memory that is handed out again
        with seeded():
            model = torch.nn.ParameterDict({"pad": torch.nn.Parameter(torch.empty(1, 4096))})
            found.append(enliven(model.requires_grad_(False))["pad"])
    assert torch.equal(*found)
    assert 0.09 < float(found[0].std()) < 0.11


@pytest.mark.parametrize("name", first_of(NAMES, *list(NAMES)[::8]))
def test_guidance_changes_a_finite_result(name: str) -> None:
    pipe = tiny.build(name)
    guided = tiny.latents(pipe, steps=2)
    plain = tiny.latents(pipe, steps=2, **WITHOUT_GUIDANCE.get(name, {"guidance_scale": 1.0}))
    assert torch.isfinite(guided).all()
    assert (guided - plain).norm() > 1e-3 * guided.norm()


@pytest.mark.breadth  # of what the tests are made of
def test_every_pipeline_has_one_kind_of_guidance_and_one_of_denoiser() -> None:
    kinds = (tiny.BATCHED, tiny.SEQUENTIAL, tiny.DISTILLED, tiny.OWN_TIMES, tiny.AMBIGUOUS)
    assert len(tiny.BUILDERS) == sum(map(len, kinds))
    for name in NAMES:
        module = type(tiny.build(name).denoiser).__module__
        assert ("transformers" in module) == (name in tiny.TRANSFORMERS_PIPED) == (name not in tiny.UNETS)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="sdxl_inpaint"):
        tiny.build("sdxxl")
