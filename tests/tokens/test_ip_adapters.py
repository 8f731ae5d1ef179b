"""IP-Adapters on transformers: what they add to attention is exact with tokens split, whatever their scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.breadth import first_of
from tests.conftest import POOL_SIZE
from tests.tensors import relative

from .changed import Change
from .ip_adapters import images, weights
from .on_ranks import PipelineCase
from .ranks import LIMIT

LOAD: dict[str, dict[str, Any]] = {
    "flux": {"weight_name": "ip.safetensors", "image_encoder_pretrained_model_name_or_path": None},
    "sd3": {"image_encoder_folder": None},
}


@pytest.mark.parametrize("name", first_of(LOAD))
def test_images_with_another_image(ranks: Any, name: str, tmp_path: Path) -> None:
    """Scales change from image to image, and with them how often a block of SD3 attends: not at all at none."""
    changes = [
        Change("load_ip_adapter", (weights(name),), LOAD[name]),
        Change("set_ip_adapter_scale", (0.0,)),
        Change("set_ip_adapter_scale", (0.8,)),
    ]
    for plan in ("patch=2", "cfg=2,patch=2"):
        case = PipelineCase(name=name, plan=plan, verifications=tmp_path / plan, options=images(name))
        found = ranks.run("tests.tokens.changed:generated_between", POOL_SIZE, case, changes)[0]
        assert len(found) == len(changes)
        for got, want in found:
            assert relative(got, want) <= LIMIT
        wanted = [want for _, want in found]
        assert relative(wanted[0], wanted[1]) > 100 * LIMIT
        assert relative(wanted[2], wanted[1]) > 100 * LIMIT


@pytest.mark.breadth
def test_from_no_image_to_one(ranks: Any, tmp_path: Path) -> None:
    """The plan kept of a model that attends once is given up where it attends twice."""
    name, generated = "sd3", []
    for scale in (0.0, 0.8):
        changes = [Change("load_ip_adapter", (weights(name),), LOAD[name]), Change("set_ip_adapter_scale", (scale,))]
        case = PipelineCase(name=name, plan="patch=2", verifications=tmp_path, options=images(name))
        found = ranks.run("tests.tokens.changed:generated_between", POOL_SIZE, case, changes[:1] + changes[1:])
        generated += found[0][1:]
    for got, want in generated:
        assert relative(got, want) <= LIMIT
