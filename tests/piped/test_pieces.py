"""A transformer in pieces on one rank: the definition, the same input again and again, and what corrections gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.piped import PipedStages
from tests.breadth import first_of
from tests.exact import denoisers
from tests.tiny.transformers import TRANSFORMERS
from tests.tokens.nobody import Nobody

from .networks import LIMIT, ByDefinition, call, errors, here, plain

FLUX, SD3, PIXART = "FluxTransformer2DModel", "SD3Transformer2DModel", "PixArtTransformer2DModel"
NAMES = (
    *(FLUX, SD3, PIXART, "WanTransformer3DModel", "QwenImageTransformer2DModel", "ZImageTransformer2DModel"),
    *(
        "CogVideoXTransformer3DModel",
        "HunyuanVideoTransformer3DModel",
        "HunyuanDiT2DModel",
        "LTXVideoTransformer3DModel",
    ),
)


@pytest.mark.parametrize("pieces", first_of([2, 4], 4))
def test_pieces_are_those_of_the_definition(kept: Path, pieces: int) -> None:
    calls = [call(FLUX, step) for step in range(3)]
    found = here(FLUX, PipedStages(pieces=pieces, correction="none", text="each"), kept).run(calls)
    assert max(errors(found, ByDefinition(FLUX, pieces).run(calls))) <= LIMIT
    assert errors(found, [plain(FLUX, each) for each in calls])[2] > 100 * LIMIT  # they are not the exact ones


@pytest.mark.parametrize("name", first_of(NAMES, FLUX, PIXART))
def test_after_an_exact_step_the_same_input_gives_the_same(kept: Path, name: str) -> None:
    calls, wanted = [call(name, 0)] * 3, plain(name, call(name, 0))
    for text in ("once", "each"):
        loop = here(name, PipedStages(pieces=3, text=text), kept)
        assert max(errors(loop.run(calls), [wanted] * 3)) <= LIMIT
    loop.denoiser.exchange = "off"
    assert errors(loop.run(calls), [wanted] * 3)[1] > 100 * LIMIT


@pytest.mark.parametrize("correction", first_of(["none", "affine+extrapolation"], "none"))
def test_old_values_are_gone_after_as_many_steps_as_blocks(kept: Path, correction: Any) -> None:
    calls = [call(FLUX, 3), *[call(FLUX, 0)] * 9]
    found = errors(
        here(FLUX, PipedStages(pieces=3, correction=correction), kept).run(calls)[1:], [plain(FLUX, calls[1])] * 9
    )
    assert found[0] > 100 * LIMIT
    assert found[-1] <= LIMIT


def test_every_correction_brings_pieces_nearer(kept: Path) -> None:
    calls = [call(FLUX, step) | {"timestep": torch.full((2,), 1.0 - 0.1 * step)} for step in range(5)]
    wanted = plain(FLUX, calls[-1])
    found = {
        kind: errors(here(FLUX, PipedStages(pieces=3, correction=kind), kept).run(calls)[-1:], [wanted])[0]
        for kind in ("none", "affine", "extrapolation", "affine+extrapolation")
    }
    assert found["affine"] < found["none"]
    assert found["affine+extrapolation"] < found["extrapolation"] < found["none"]


def test_warm_up_to_the_end_is_exact_and_an_image_does_not_see_the_last_one(kept: Path) -> None:
    calls = [call(FLUX, step) for step in range(3)]
    loop = here(FLUX, PipedStages(pieces=3, warmup_steps=3), kept)
    assert all(torch.equal(x, plain(FLUX, each)) for x, each in zip(loop.run(calls), calls, strict=True))
    loop = here(FLUX, PipedStages(pieces=3), kept)
    first = loop.run(calls)
    loop.run([call(FLUX, 7)] * 2)
    assert all(map(torch.equal, loop.run(calls), first))


def test_memory_is_of_the_pieces_that_there_are_now(kept: Path) -> None:
    """Calls look the same as those of the last image, but their tokens are divided in another way."""
    calls = [call(FLUX, step) for step in range(3)]
    loop = here(FLUX, PipedStages(pieces=3), kept)
    loop.run(calls)
    loop.denoiser.pieces = 2
    assert all(map(torch.equal, loop.run(calls), here(FLUX, PipedStages(pieces=2), kept).run(calls)))


@torch.no_grad()
def test_an_attention_that_the_exact_step_did_not_pass_is_refused(kept: Path) -> None:
    loop = here(FLUX, PipedStages(pieces=3), kept)
    steps = loop.steps(2)
    loop.prediction(call(FLUX, next(steps)))
    for known in loop.denoiser.history.cache._calls.values():
        known.entries.clear()
    given = call(FLUX, next(steps))
    with pytest.raises(UnsupportedModel, match=r"has not run in the exact steps.*use more warmup_steps"):
        loop.prediction(given)


def test_restore_leaves_the_network_as_it_was(kept: Path) -> None:
    network = TRANSFORMERS[FLUX].build()
    modules = [dict(vars(each)) for each in network.modules()]
    loop = here(FLUX, PipedStages(), kept, network)
    loop.run([call(FLUX, 0)] * 2)
    loop.denoiser.restore()
    assert [vars(each).keys() for each in network.modules()] == [each.keys() for each in modules]
    with torch.no_grad():
        assert torch.equal(network(**call(FLUX, 0))[0], plain(FLUX, call(FLUX, 0)))


def test_a_network_of_convolutions_is_refused() -> None:
    strategy = PipedStages()
    with pytest.raises(
        UnsupportedModel, match=r"UNet2DConditionModel is a network of convolutions: use strategy=exact"
    ):
        strategy.install(denoisers.build("sdxl"), Communicator(Nobody(0, "cpu")), Axis("stage"), clock=StepClock())


@pytest.mark.breadth
def test_networks_that_have_no_pieces_are_refused(kept: Path) -> None:
    strategy = PipedStages()
    with pytest.raises(UnsupportedModel, match="meet in sums or convolutions"):
        here("SanaTransformer2DModel", strategy, kept).run([call("SanaTransformer2DModel", 0)])
    with pytest.raises(PlanError, match=r"pieces=36, but transformer_blocks\.0 attention 0 has 35 tokens"):
        here(FLUX, PipedStages(pieces=36), kept).run([call(FLUX, 0)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pieces": 0}, "pieces=0: it is a whole number of at least 1"),
        ({"warmup_steps": 0}, "at least 1 step is exact"),
        ({"correction": "linear"}, "correction='linear': use affine\\+extrapolation, affine, extrapolation, none"),
        ({"text": "never"}, "text='never': use once, each"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        PipedStages(**options)
