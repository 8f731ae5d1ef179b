"""Code of other libraries in a denoiser: exact under every plan, or refused in words, never silently wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.breadth import first_of
from tests.exact.planted import PROMPTS

FOUND = "tests.exact.planted:found"
LIMIT = 1e-5
TWO = {"prompt": PROMPTS[:2]}
THREE = {"prompt": PROMPTS}
UNGUIDED = {"guidance_scale": 1.0}
LARGE = {"height": 128, "width": 128}
STRUCTURE = "patch=2,strategy=structure:native=64,switch=0.3"


def is_exact(found: dict[str, Any]) -> bool:
    return "error" in found and found["error"] <= LIMIT < 1e-3 < found["effect"]


@pytest.mark.parametrize(
    ("plant", "options", "when"),
    first_of(
        [
            (plant, options, when)
            for plant in ("image", "counted", "reused")
            for options in (TWO, THREE | UNGUIDED)
            for when in ("before", "after")
        ],
        ("reused", THREE | UNGUIDED, "before"),
    ),
    ids=str,
)
def test_what_treats_each_image_alone_is_exact_with_prompts_on_several_ranks(
    ranks: Any, tmp_path: Path, plant: str, options: dict[str, Any], when: str
) -> None:
    for found in ranks.run(FOUND, 2, "data=2", plant, str(tmp_path), options, when):
        assert is_exact(found), found


@pytest.mark.parametrize(
    ("plant", "options", "when"),
    first_of(
        [
            *((plant, TWO, when) for plant in ("batch", "batch, later") for when in ("before", "after")),
            ("parity", THREE | UNGUIDED, "before"),
        ],
        ("batch, later", TWO, "before"),
    ),
    ids=str,
)
def test_what_mixes_prompts_is_refused_where_they_are_on_several_ranks(
    ranks: Any, tmp_path: Path, plant: str, options: dict[str, Any], when: str
) -> None:
    """Each rank that it concerns finds it by itself, in the step in which it begins."""
    concerned = [True, plant != "parity"]  # one prompt of three is odd, as three are
    for each, is_mixed in zip(
        ranks.run(FOUND, 2, "data=2", plant, str(tmp_path), options, when), concerned, strict=True
    ):
        if not is_mixed:
            assert is_exact(each), each
            continue
        assert "message" in each, each
        assert each["message"].startswith("VerificationError: UNet2DConditionModel with "), each
        assert "tests.exact" in each["message"]
        assert "mixes prompts" in each["message"]
        assert "use data=1" in each["message"]


@pytest.mark.breadth
def test_noise_of_a_denoiser_is_refused_where_prompts_are_on_several_ranks(ranks: Any, tmp_path: Path) -> None:
    for each in ranks.run(FOUND, 2, "data=2", "noise", str(tmp_path), TWO):
        assert each["message"].startswith(
            "PlanError: StableDiffusionPipeline samples noise for 2 rows from torch's own"
        )
        assert "Use data=1" in each["message"]


@pytest.mark.breadth
@pytest.mark.parametrize("plan", ["data=2,cfg=2", "data=2,patch=2"])
@pytest.mark.parametrize("plant", ["counted", "batch, later"])
def test_prompts_beside_another_axis(ranks: Any, tmp_path: Path, plan: str, plant: str) -> None:
    for found in ranks.run(FOUND, 4, plan, plant, str(tmp_path), TWO):
        assert is_exact(found) if plant == "counted" else "VerificationError" in found["message"], found


def test_without_the_comparison_prompts_are_silently_mixed_otherwise(ranks: Any, tmp_path: Path) -> None:
    """Negative control: trusted by name, which is the user's word that it does the same in every step."""
    for found in ranks.run(FOUND, 2, "data=2", "batch, later", str(tmp_path), TWO, "before", ["tests"]):
        assert found["error"] > 1e-3, found


@pytest.mark.parametrize("when", first_of(["before", "after"], "before"))
def test_a_whole_image_hook_is_one_of_patches_with_structure_guidance(ranks: Any, tmp_path: Path, when: str) -> None:
    """On any number of ranks: the image is that of one rank with the same plan and hook."""
    for found in ranks.run(FOUND, 2, STRUCTURE, "image", str(tmp_path), LARGE, when):
        assert is_exact(found), found


@pytest.mark.parametrize(
    ("plant", "plan", "words"),
    first_of(
        [
            ("batch", STRUCTURE, "mixes guidance branches"),
            ("batch", f"{STRUCTURE},bands=2", "mixes guidance branches"),
            ("counted", STRUCTURE, "keeps something from one call to the next"),
            ("reused", STRUCTURE, "keeps something from one call to the next"),
            ("noise", STRUCTURE, "keeps something from one call to the next"),
        ],
        ("batch", STRUCTURE, "mixes guidance branches"),
        ("reused", STRUCTURE, "keeps something from one call to the next"),
    ),
)
def test_what_depends_on_other_patches_or_branches_is_refused(
    ranks: Any, tmp_path: Path, plant: str, plan: str, words: str
) -> None:
    for found in ranks.run(FOUND, 2, plan, plant, str(tmp_path), LARGE):
        assert words in found["message"], found
        assert "strategy=exact" in found["message"]


def test_on_one_rank_too_nothing_is_kept_from_one_patch_for_another(ranks: Any, tmp_path: Path) -> None:
    (found,) = ranks.run(FOUND, 1, STRUCTURE.replace("patch=2", "patch=1"), "reused", str(tmp_path), LARGE)
    assert "is for another patch of the image" in found["message"], found


def test_without_the_comparison_patches_are_silently_wrong(ranks: Any, tmp_path: Path) -> None:
    """Negative control: as with verify=False."""
    found = ranks.run(FOUND, 2, STRUCTURE, "batch", str(tmp_path), LARGE, "before", None)
    assert max(each["error"] for each in found) > 1e-3, found


@pytest.mark.parametrize(
    ("plan", "options", "is_refused"),
    first_of(
        [
            ("patch=2", TWO, True),
            ("patch=2", {}, True),
            ("cfg=2", {}, True),
            ("cfg=2", TWO, False),
            ("data=2", TWO, False),
            ("data=2", TWO | UNGUIDED, True),
        ],
        ("patch=2", {}, True),
    ),
    ids=str,
)
def test_merged_tokens(ranks: Any, tmp_path: Path, plan: str, options: dict[str, Any], is_refused: bool) -> None:
    """Bands, and halves of a batch of odd size, match other tokens; two prompts on two ranks match the same ones."""
    for found in ranks.run(FOUND, 2, plan, "merged", str(tmp_path), options):
        assert "MergingBlock" in found["message"] if is_refused else is_exact(found), found


@pytest.mark.breadth
def test_merged_tokens_of_patches(ranks: Any, tmp_path: Path) -> None:
    """Its hook on the whole network is called once in a step, with the whole image: patches have fewer tokens."""
    for found in ranks.run(FOUND, 2, STRUCTURE, "merged", str(tmp_path), LARGE):
        assert max(found["error"], found["effect"]) <= LIMIT, found
