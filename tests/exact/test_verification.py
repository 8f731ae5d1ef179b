"""Before a denoiser is used in bands it is checked against itself; what does not come out right is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import first_of
from tests.exact import denoisers

ON_RANKS = "tests.exact.on_ranks"


@pytest.mark.parametrize(
    "name", first_of(["sdxl", "controlnet", "svd", "motion", "unet3d", "asymmetric"], "controlnet")
)
def test_every_kind_verifies_once(ranks: Any, tmp_path: Path, name: str) -> None:
    for (error, calls), (again, calls_again) in ranks.run(f"{ON_RANKS}:verified", 2, name, str(tmp_path)):
        assert 0 < error < 1e-5
        assert again == pytest.approx(error)
        refused = 0 if denoisers.KINDS[name].odd else 1  # the denoiser itself does not take the first size
        assert (calls, calls_again) == (2 + refused + 4 + 1, 2 + 1)  # discovery, two sizes both ways, the call


@pytest.mark.parametrize("world", first_of([2, 3], 3))
def test_a_model_that_mixes_positions_in_an_unknown_way_is_refused_with_the_figures(
    ranks: Any, tmp_path: Path, world: int
) -> None:
    for message in ranks.run(f"{ON_RANKS}:verified", world, "sd", str(tmp_path), "centred"):
        assert len(message) == 2  # it was not remembered as good
        for text in message:
            assert text.startswith(f"VerificationError: the denoiser split into {world} bands differs")
            assert "use plan cfg=2" in text
            assert text.count("e-0") >= 3  # two figures and the limit
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.breadth
@pytest.mark.parametrize("world", first_of([2, 3], 3))
def test_squeeze_and_excitation_is_exact(ranks: Any, tmp_path: Path, world: int) -> None:
    """A pooling of the whole map, by a module that is called with the embedding of the time step as well."""
    for (error, _), (again, _) in ranks.run(f"{ON_RANKS}:verified", world, "sd", str(tmp_path), "pooled"):
        assert 0 < error < 1e-5
        assert again == pytest.approx(error)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("replicate", "UnsupportedModel: conv_out pads with 'replicate'"),
        ("widened", "PlanError: a convolution reads 2 rows of its neighbours, but a band has only 1 there: use fewer"),
        ("unprojected", "UnsupportedModel: .*attn1.*Unprojected calls neither .*set_default_attn_processor"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(ranks: Any, tmp_path: Path, change: str, says: str) -> None:
    for message in ranks.run(f"{ON_RANKS}:verified", 2, "sd", str(tmp_path), change):
        assert len(message) == 2, "also where a verdict could be kept"
        for text in message:
            assert re.match(says, text), text


@pytest.mark.parametrize(
    ("size", "arguments", "says"),
    [
        ((16, 8), {"cross_attention_kwargs": {"gligen": {}}}, "UnsupportedModel: gligen .*cfg=2"),
        ((8, 4), {}, "PlanError: 8 latent rows make 2 bands of 4 rows, too few for 3 ranks: use at most 2 on axis"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(
    ranks: Any, size: tuple[int, int], arguments: dict[str, Any], says: str
) -> None:
    for text in ranks.run(f"{ON_RANKS}:refused", 3, "sd", *size, arguments):
        assert re.match(says, text), text
