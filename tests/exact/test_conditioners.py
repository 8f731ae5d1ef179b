"""ControlNets in bands: final latents of one process within 1e-5, each rank with its rows only, residuals not sent."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.breadth import first_of
from tests.exact.conditioners import XL, Case, compared
from tests.tensors import relative

LIMIT, CONTROL = 1e-5, 1e-4
SIZE = {"height": 96, "width": 128}
CASES = {
    "one": (Case(), 1 / 2),
    "SDXL": (Case(name=XL), 1 / 2),
    "guidance and bands": (Case(name=XL, plan="cfg=2,patch=2"), 1 / 4),
    "guess": (Case(call={"guess_mode": True}), 1 / 2),
    "some steps": (Case(call={"control_guidance_start": 0.3, "control_guidance_end": 0.7}), 1 / 2),
    "columns": (Case(call=SIZE), 1 / 2),
    "image to image": (Case(name="StableDiffusionXLControlNetImg2ImgPipeline"), 1 / 2),
    "inpaint": (Case(name="StableDiffusionXLControlNetInpaintPipeline"), 1 / 2),
    "video": (Case(name="AnimateDiffControlNetPipeline"), 1 / 2),
    "sparse video": (Case(name="AnimateDiffSparseControlNetPipeline"), 1 / 2),
    "several and guidance": (Case(change="two", plan="cfg=2,patch=2"), 1 / 2),
    "guess and guidance": (Case(plan="cfg=2,patch=2", call={"guess_mode": True}), 1 / 2),
    "sharded weights": (Case(name=XL, plan="patch=2,weights=sharded"), 1 / 2),
    "guidance and hosted weights": (Case(name=XL, plan="cfg=2,patch=2,weights=hosted"), 1 / 4),
    "fresh edges": (Case(name=XL, plan="cfg=2,patch=2,strategy=fresh-edges:warmup_steps=3"), 1 / 4),
    "displaced": (Case(name=XL, plan="patch=2,strategy=displaced:warmup_steps=3"), 1 / 2),
    "several": (Case(change="two", call={"controlnet_conditioning_scale": [0.8, 0.4]}), 1 / 2),
}


@pytest.mark.parametrize("which", first_of(CASES, "one", "guidance and bands"))
def test_final_latents(tmp_path: Path, which: str) -> None:
    case, part = CASES[which]
    found = compared(case, tmp_path)
    assert max(each.error for each in found) <= LIMIT, found
    assert found[0].alone >= CONTROL, found
    assert [each.elements for each in found] == pytest.approx([part] * len(found))
    added_up = case.change == "two"  # diffusers adds up the middle ones in place, which gathers these
    assert [each.gathered > 0 for each in found] == [added_up] * len(found)
    assert not any(each.hooked for each in found)


@pytest.mark.parametrize("strategy", first_of(("displaced", "pcpp"), "displaced"))
def test_stale_steps_are_those_beside_a_whole_controlnet(tmp_path: Path, strategy: str) -> None:
    """In bands a ControlNet is exact in every step; without trust in the code that counts here, it runs whole."""
    case = Case(name=XL, plan=f"patch=2,strategy={strategy}:warmup_steps=1", change="louder")
    in_bands = compared(case, tmp_path / "in bands")
    whole = compared(replace(case, trusted=frozenset()), tmp_path / "whole")
    for found, expected in zip(in_bands, whole, strict=True):
        assert (found.elements, expected.elements) == (pytest.approx(1 / 2), 1)
        assert expected.error >= CONTROL, "no step was stale"
        assert relative(found.latents, expected.latents) <= LIMIT
        assert found.alone >= 2 * found.error, "what the ControlNet exchanges does not show"


def test_residuals_in_other_bands_than_the_denoisers_are_gathered(tmp_path: Path) -> None:
    """Of 24 rows the ControlNet takes 16 and 8, in units of 8; the denoiser takes 12 and 12."""
    found = compared(Case(change="deeper", call={"height": 192, "width": 192}), tmp_path)
    assert max(each.error for each in found) <= LIMIT, found
    assert [each.elements for each in found] == pytest.approx([2 / 3, 1 / 3])
    assert min(each.gathered for each in found) > 0


WHOLE = {
    "means over the image": (
        Case(name="StableDiffusionXLControlNetUnionPipeline"),
        "ControlNetUnionModel runs whole .* VerificationError",
    ),
    "positions mixed": (Case(change="centred"), "VerificationError: .* differs from the plain one"),
    "positions mixed, inactive at first": (
        Case(change="centred", call={"control_guidance_start": 0.3}),
        "VerificationError: .* differs from the plain one",
    ),
    "positions mixed, not verified": (
        Case(change="centred", verify=False),
        "VerificationError: .* differs from the plain one",
    ),
    "not trained": (Case(change="zeros"), "all that it returns is zeros"),
    "bands of fewer rows": (Case(change="deeper", call={"height": 64, "width": 64}), "too few for 2 ranks"),
    "foreign code": (Case(trusted=frozenset()), "may do in any step what it did not in the first"),
}


@pytest.mark.parametrize("which", first_of(WHOLE, "positions mixed, inactive at first"))
def test_what_cannot_be_split_runs_whole(tmp_path: Path, which: str, caplog: pytest.LogCaptureFixture) -> None:
    case, reason = WHOLE[which]
    found = compared(case, tmp_path)
    assert max(each.error for each in found) <= LIMIT, found
    assert [each.elements for each in found] == [1, 1]
    assert [each.alone for each in found] == [each.error for each in found]
    warned = [each.getMessage() for each in caplog.records if "runs whole on every rank" in each.getMessage()]
    assert len(warned) == 1
    assert re.search(reason, warned[0]), warned
