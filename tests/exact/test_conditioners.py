"""ControlNets in bands: final latents of one process within 1e-5, each rank with its rows only, residuals not sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.breadth import first_of
from tests.exact.conditioners import SD, XL, Case, compared

LIMIT, CONTROL = 1e-5, 1e-4
SIZE = {"height": 96, "width": 128}
CASES = {
    "one": (Case(), 1 / 2),
    "SDXL": (Case(name=XL), 1 / 2),
    "guidance and bands": (Case(name=XL, plan="cfg=2,patch=2"), 1 / 4),
    "guess": (Case(call={"guess_mode": True}), 1 / 2),
    "some steps": (Case(call={"control_guidance_start": 0.4, "control_guidance_end": 0.7}), 1 / 2),
    "columns": (Case(call=SIZE), 1 / 2),
    "image to image": (Case(name="StableDiffusionXLControlNetImg2ImgPipeline"), 1 / 2),
    "inpaint": (Case(name="StableDiffusionXLControlNetInpaintPipeline"), 1 / 2),
    "video": (Case(name="AnimateDiffControlNetPipeline"), 1 / 2),
    "sparse video": (Case(name="AnimateDiffSparseControlNetPipeline"), 1 / 2),
    "several and guidance": (Case(change="two", plan="cfg=2,patch=2"), 1 / 2),
    "guess and guidance": (Case(plan="cfg=2,patch=2", call={"guess_mode": True}), 1 / 2),
    "displaced": (Case(name=XL, plan="patch=2,strategy=displaced:warmup_steps=3"), 1 / 2),
    "several": (Case(change="two", call={"controlnet_conditioning_scale": [0.8, 0.4]}), 1 / 2),
}


@pytest.mark.parametrize("which", first_of(CASES, "one", "guidance and bands"))
def test_final_latents(tmp_path: Path, which: str) -> None:
    case, part = CASES[which]
    found = compared(case, tmp_path)
    print(which, found)
    assert max(each.error for each in found) <= LIMIT, found
    assert found[0].alone >= CONTROL, found
    assert [each.elements for each in found] == pytest.approx([part] * len(found))
    assert [each.gathered for each in found] == [0] * len(found)
    assert not any(each.hooked for each in found)
