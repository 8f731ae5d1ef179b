"""Divided weights beside everything else that a plan can have: for every class of networks and kind of pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from patchpar.errors import WorkerError
from patchpar.plan.plan import Plan
from tests import tiny
from tests.breadth import first_of
from tests.exact import denoisers
from tests.stages.on_ranks import built
from tests.tiny.transformers import TRANSFORMERS
from tests.tokens.test_exact import REFUSED
from tests.weights.strategies import KINDS
from tests.weights.strategies import STEPS as GUIDED_STEPS

ON_RANKS = "tests.weights.strategies"
NAMES = [*TRANSFORMERS, *denoisers.KINDS]
NETWORKS = {"sdxl": "UNet", "sd3": "joint transformer", "pixart": "cross-attention transformer", "wan": "video"}
EXACT_ONLY = (
    "AnyFlowFARTransformer3DModel",
    "Kandinsky6SRTransformer3DModel",
    "SanaTransformer2DModel",
    "SanaVideoTransformer3DModel",
    "WanAnimate2Transformer3DModel",
)
"""Classes whose stale values are not kept."""
CACHED = (
    "CogVideoXTransformer3DModel",
    "CogView4Transformer2DModel",
    "FluxTransformer2DModel",
    "HunyuanImageTransformer2DModel",
    "HunyuanVideoFramepackTransformer3DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "MochiTransformer3DModel",
    "QwenImageTransformer2DModel",
    "WanTransformer3DModel",
    "WanVACETransformer3DModel",
)
"""Classes of which diffusers knows the blocks that its first-block cache leaves out."""
NO_SAMPLE = ("MiniMaxMusic3RVQDepthDecoder", "RFD4ProteinaTransformer", "T5FilmDecoder")
"""Classes without an image or a video, whose guidance is not split with whole weights either."""
BOTH_BRANCHES = ("WanAnimate2Transformer3DModel",)
"""Classes of which every rank makes all calls."""
BLOCKS = "_repeated_blocks"
"""Of networks that diffusers can compile block by block."""
THREE_BRANCHES = ("instruct_pix2pix",)
"""Pipelines with two kinds of guidance, whose branches two ranks cannot share."""
PLANS = [
    "patch=2",
    "patch=3",
    "cfg=2",
    "cfg=2,patch=2",
    "patch=2,strategy=fresh-edges:warmup_steps=1",
    "patch=2,strategy=pcpp:warmup_steps=1",
]


@pytest.mark.breadth
@pytest.mark.parametrize("name", first_of(NAMES, "PixArtTransformer2DModel"))
def test_strategies_on_networks_of_diffusers(ranks: Any, name: str) -> None:
    """Bits of the same strategy with whole weights, or the same refusal, of the classes that are refused with these."""
    for found in ranks.run(f"{ON_RANKS}:every_strategy", 2, name):
        assert len(found) == 6
        for strategy, each in found.items():
            is_refused = name in REFUSED or (name in EXACT_ONLY and not strategy.startswith("exact"))
            assert isinstance(each, str) if is_refused else each is True, (strategy, each)


@pytest.mark.breadth
@pytest.mark.parametrize("name", NAMES)
def test_guidance_on_networks_of_diffusers(ranks: Any, name: str) -> None:
    """Bits of whole weights, where each rank computes another branch of guidance: in one call, and in calls in turn."""
    if name in NO_SAMPLE:
        with pytest.raises(WorkerError, match=r"none of these is known to be its sample .* Run it without guidance"):
            ranks.run(f"{ON_RANKS}:guided", 2, name)
        return
    for found in ranks.run(f"{ON_RANKS}:guided", 2, name):
        assert len(found) == 4
        for kind, (is_equal, calls) in found.items():
            assert is_equal, kind
            most = GUIDED_STEPS * 2 if name in BOTH_BRANCHES else GUIDED_STEPS + 1  # the first step is made by both
            assert calls == (1 if kind.startswith("one call") else most), kind


@pytest.mark.breadth
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_step_caches_on_networks_of_diffusers(ranks: Any, name: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:step_cache", 2, name):
        assert all(found.values()) if name in CACHED else "none" in found or all(found.values()), found


@pytest.mark.breadth
@pytest.mark.parametrize("name", NAMES)
def test_compiled_blocks_of_networks_of_diffusers(ranks: Any, name: str) -> None:
    network, _ = built(name)
    wanted = getattr(network, BLOCKS, None) or ()  # of the class, which may be built without any
    has_blocks = any(type(module).__name__ in wanted for module in network.modules())
    for found in ranks.run(f"{ON_RANKS}:compiled", 2, name):
        assert ("none" in found) != has_blocks, found
        assert "none" in found or set(found.values()) == {(True, found["whole"][1])}, found
        assert "none" in found or found["whole"][1] > 0


@pytest.mark.breadth
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NETWORKS)
def test_plans_of_each_kind_of_network(ranks: Any, name: str, plan: str, kind: str) -> None:
    same_latents(ranks, name, plan, kind)


@pytest.mark.breadth
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*tiny.BATCHED, *tiny.SEQUENTIAL])
def test_guidance_in_one_call_and_in_two(ranks: Any, name: str, kind: str) -> None:
    same_latents(ranks, name, "cfg=3" if name in THREE_BRANCHES else "cfg=2", kind)


def same_latents(ranks: Any, name: str, plan: str, kind: str) -> None:
    found = ranks.run("tests.weights.pipelines:both", 4, name, plan, None, kind)[: Plan.parse(plan).world_size]
    for each in found:
        assert each is None or (all(each["equal"]) and each["restored"] and each["blocks"])
    assert found[0] is not None
    assert found[0]["equal"] == [True, True]
