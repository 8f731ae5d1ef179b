"""The grid that a folder shows is a part of that of the loaded model, so that nothing is refused that would go."""

from __future__ import annotations

from pathlib import Path

import pytest

from patchpar.errors import PlanError
from patchpar.models.files import embedded_model
from patchpar.models.info import describe
from patchpar.models.size_grid import COMMON_UNIT, LEAST_UNIT, check_sides, grid_of
from tests.breadth import first_of
from tests.tiny import build

NAMES = ("sdxl", "flux", "sd3", "sd", "pixart", "auraflow", "chroma", "cogview4", "lumina2", "zimage", "qwen", "wan")


@pytest.mark.parametrize("name", first_of(NAMES, "sdxl", "flux"))
def test_the_units_of_a_folder_hold_that_of_the_model(name: str, tmp_path: Path) -> None:
    pipe = build(name).pipe
    pipe.save_config(tmp_path)
    for part, network in pipe.components.items():
        if hasattr(network, "save_config"):
            network.save_config(tmp_path / part)
    unit, offered = grid_of(tmp_path)
    own = describe(pipe).size_unit
    assert own % unit == 0
    assert offered % own == 0
    assert unit >= LEAST_UNIT


def test_the_embedded_models_are_known() -> None:
    assert grid_of(embedded_model("embedded")) == (8, 8)
    assert grid_of(embedded_model("embedded-dit")) == (16, COMMON_UNIT)


def test_a_side_off_the_grid() -> None:
    with pytest.raises(PlanError, match="width=104 is no multiple of 16, the model's grid: use 64 or 128"):
        check_sides(embedded_model("embedded-dit"), height=None, width=104)
    with pytest.raises(PlanError, match="height=1001 is no multiple of 8, the model's grid: use 960 or 1024"):
        check_sides(None, height=1001, width=None)
    check_sides(None, height=1000, width=1032)


def test_a_folder_that_cannot_be_read_shows_nothing(tmp_path: Path) -> None:
    """What is wrong with it is said when it is loaded."""
    assert grid_of(tmp_path) == (LEAST_UNIT, COMMON_UNIT)
