"""Whole numbers of numpy and torch are taken wherever Python's own are: sizes, counts, degrees, options, devices."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchpar.errors import PlanError
from patchpar.launch.devices import resolve_devices
from patchpar.launch.executor import check_deadline
from patchpar.models.info import PipelineInfo, describe
from patchpar.models.streaming.fifo.queue import FifoConfig, FifoOptions
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.validate import bind, check_call, check_plan_for
from patchpar.plan.plan import Plan
from patchpar.plan.scalars import is_number, is_whole, plain
from patchpar.plan.stream_plan import StreamPlan
from patchpar.strategies.displaced import DisplacedPatch
from patchpar.strategies.exact import ExactPatch
from patchpar.strategies.fresh_edges import FreshEdges
from patchpar.strategies.pcpp import PartiallyConditioned
from patchpar.strategies.structure.options import StructureGuidance
from patchpar.stream.delivery import StreamDelivery
from patchpar.stream.images.session import ImageStreamOptions
from tests.tiny import build

REPOSITORY = Path(__file__).parents[2]
KINDS = (int, np.int64, np.int32, np.uint8, np.array, torch.tensor)


@pytest.fixture(scope="module")
def model() -> PipelineInfo:
    return describe(build("sdxl").pipe)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_counts_of_a_call(model: PipelineInfo, kind: Any) -> None:
    """What is bound is what the same call in Python's own numbers binds: same checks, same plan, same arguments."""
    own = {"height": 128, "width": 192, "num_inference_steps": 2, "num_images_per_prompt": 1}
    bound = bind(model, ("a house",), {name: kind(value) for name, value in own.items()})
    assert bound == {"prompt": "a house", **own}
    assert all(type(bound[name]) is int for name in own)
    check_call(model, bound)
    check_plan_for(model, Plan(patch=2), bound)
    assert choose(model, 3, bound) == choose(model, 3, {"prompt": "a house", **own})


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, torch.tensor])
@pytest.mark.parametrize(("scale", "guided"), [(5.0, True), (1.0, False)])
def test_scales_of_a_call(model: PipelineInfo, kind: Any, scale: float, guided: bool) -> None:
    bound = bind(model, ("a house",), {"guidance_scale": kind(scale)})
    assert type(bound["guidance_scale"]) is float
    assert model.guided(bound) is guided
    assert model.guided({"guidance_scale": kind(scale)}) is guided


def test_what_is_no_number_by_default_stays_a_tensor(model: PipelineInfo) -> None:
    """An argument that may be a tensor is handed on as it is."""
    latents = torch.tensor(3)
    assert bind(model, (), {"latents": latents})["latents"] is latents


@pytest.mark.parametrize("wrong", [np.int64(-8), np.float64(128.5), np.array([128, 128]), np.bool_(True)])
def test_what_is_no_size_is_refused_as_before(model: PipelineInfo, wrong: Any) -> None:
    with pytest.raises(PlanError, match="height="):
        check_call(model, bind(model, (), {"height": wrong}))


@pytest.mark.parametrize("kind", KINDS)
def test_plans_and_options(kind: Any) -> None:
    assert Plan(cfg=kind(2), patch=kind(2)) == Plan(cfg=2, patch=2)
    assert str(Plan(patch=kind(2))) == "patch=2,strategy=exact"
    for made, own in [
        (ExactPatch(ulysses=kind(2)), ExactPatch(ulysses=2)),
        (FreshEdges(warmup_steps=kind(2), bits=kind(4)), FreshEdges(warmup_steps=2, bits=4)),
        (FreshEdges(context="pooled", pool=kind(2)), FreshEdges(context="pooled", pool=2)),
        (DisplacedPatch(warmup_steps=kind(3)), DisplacedPatch(warmup_steps=3)),
        (PartiallyConditioned(warmup_steps=kind(3)), PartiallyConditioned(warmup_steps=3)),
        (StructureGuidance(seed=kind(7), bands=kind(2)), StructureGuidance(seed=7, bands=2)),
        (StreamDelivery(lead=kind(3)), StreamDelivery(lead=3)),
        (ImageStreamOptions(ranks=1, seed=kind(7)), ImageStreamOptions(ranks=1, seed=7)),
    ]:
        assert made == own
        assert repr(made) == repr(own)


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor])
def test_fractions_and_aims(kind: Any) -> None:
    assert repr(PartiallyConditioned(fraction=kind(0.25))) == repr(PartiallyConditioned(fraction=0.25))
    assert repr(FreshEdges(quality=kind(40.0))) == repr(FreshEdges(quality=40.0))
    assert check_deadline("deadline", kind(2.5)) == 2.5


def test_a_number_of_devices() -> None:
    assert resolve_devices(np.int64(1)) == resolve_devices(1)
    with pytest.raises(PlanError, match="degree of an axis"):
        Plan(patch=np.float64(2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["3", None, [3], torch.ones(1), object()])
def test_nothing_else_is_touched(value: Any) -> None:
    assert plain(value) is value


@pytest.mark.parametrize("wrong", [True, False, 0, -1, 1.0, "1", None, float("nan")])
def test_what_is_no_count(wrong: Any) -> None:
    assert not is_whole(wrong)


@pytest.mark.parametrize("wrong", [True, False, float("nan"), "1", None, -0.1, 1.1])
def test_what_is_no_number_within_limits(wrong: Any) -> None:
    assert not is_number(wrong, 0, 1)
    assert is_number(1, 0, 1)


@pytest.mark.parametrize("option", ["bands", "seed", "native", "overlap"])
def test_true_is_no_count_of_structure_guidance(option: str) -> None:
    with pytest.raises(PlanError, match=f"{option}=True"):
        StructureGuidance(**{option: True})


@pytest.mark.parametrize(
    ("options", "name", "wrong"),
    [
        *((StreamDelivery, "lead", wrong) for wrong in (True, 1.5, "2", None)),
        *((StreamDelivery, name, "1") for name in ("restarts", "hold", "fps")),
        *((partial(ImageStreamOptions, ranks=1), name, 1.5) for name in ("lead", "seed")),
        (partial(StreamPlan, sizes=(1,)), "inner", True),
        (StreamPlan, "sizes", (1, 1.5)),
        *((FifoOptions, name, wrong) for name in ("window", "partitions", "first_steps") for wrong in (True, 4.5)),
        *((FifoConfig, name, wrong) for name in ("height", "text_tokens", "fps") for wrong in (True, "9")),
    ],
)
def test_options_of_streams(options: Any, name: str, wrong: Any) -> None:
    """What is no such number is refused in words, before there are ranks."""
    given = {"seed": 0} if isinstance(options, partial) and options.func is ImageStreamOptions else {}
    with pytest.raises(PlanError, match=f"{name}="):
        options(**{**given, name: wrong})


def test_what_a_number_is_is_said_in_one_place() -> None:
    """Nowhere else is a bool told from a number by hand."""
    by_hand = re.compile(r"isinstance\([\w.]+, bool\) or not isinstance\([\w.]+, |isinstance\([\w.]+, int\) and not")
    folders = (REPOSITORY / "patchpar", REPOSITORY / "app")
    positions = [path for folder in folders for path in folder.rglob("*.py") if by_hand.search(path.read_text())]
    assert [path.name for path in positions] == ["scalars.py"]
