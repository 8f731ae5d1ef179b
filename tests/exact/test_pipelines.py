"""Final latents of whole pipelines, on two to four ranks: those of one process within 1e-5.

The cases are spread over pipelines; `python -m benchmarks.parity` runs and prints the whole table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.breadth import first_of
from tests.exact.pipelines import Case

LIMIT, CONTROL = 1e-5, 1e-2
LEAST_DB = 100.0
NAMES = (
    "sd",
    "sdxl",
    "sdxl_img2img",
    "sdxl_inpaint",
    "sd_controlnet",
    "sdxl_controlnet",
    "svd",
    "animatediff",
    "text_to_video",
    "embedded",
)
SCHEDULERS = ("DDIM", "Euler ancestral", "DPM++ 2M")


def cases_of(name: str) -> list[Case]:
    """Two, three and four ranks, with and without guidance, sizes that are no multiple of the stride."""
    position = NAMES.index(name)
    first, second, third = (SCHEDULERS[(position + i) % 3] for i in range(3))
    four = Case(plan="cfg=2,patch=2", scheduler=third, size=(136, 104))
    return [
        Case(plan="patch=2", scheduler=first, control=True),
        Case(plan="patch=3", scheduler=second, guided=False, size=(104, 136)),
        four if position % 2 else Case(plan="patch=4", scheduler=third, size=(168, 136)),
    ]


@pytest.mark.parametrize("name", first_of(NAMES, "sd"))
def test_final_latents(ranks: Any, tmp_path: Path, name: str) -> None:
    found = ranks.run("tests.exact.pipelines:compared", 4, name, cases_of(name)[:2], str(tmp_path))[0]
    assert max(each.relative_error for each in found) <= LIMIT, found
    assert min(each.psnr_db for each in found) >= LEAST_DB, found
    assert found[0].control_error >= CONTROL, found


@pytest.mark.breadth
@pytest.mark.parametrize("name", NAMES)
def test_final_latents_of_four_ranks(ranks: Any, tmp_path: Path, name: str) -> None:
    (found,) = ranks.run("tests.exact.pipelines:compared", 4, name, cases_of(name)[2:], str(tmp_path))[0]
    assert found.relative_error <= LIMIT, found
    assert found.psnr_db >= LEAST_DB, found


@pytest.mark.parametrize("dtype", first_of([torch.bfloat16, torch.float16], torch.bfloat16))
def test_in_half_precision_no_farther_off_than_one_process(ranks: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """And no farther from plain diffusers than that is from itself with another kernel of attention."""
    cases = [Case(plan="patch=2", scheduler="DDIM", control=True)]
    (found,) = ranks.run("tests.exact.pipelines:halved", 4, "sd", dtype, cases, str(tmp_path))[0]
    assert found.ours_off <= 1.5 * found.plain_off, found
    assert found.ours <= 1.5 * found.math, found
    assert found.alone > 3 * found.ours, found
