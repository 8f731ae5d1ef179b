"""What is sent is what the closed formula says, to the byte, in as many rounds as announced."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import volumes
from patchpar.patches import split_bands


@pytest.mark.parametrize(("world", "height"), [(2, 36), (3, 36), (4, 36), (3, 27)])
def test_bytes_of_a_call_are_those_of_the_formula(ranks: Any, world: int, height: int) -> None:
    for found in ranks.run("benchmarks.volumes:counted", world, "sdxl", height, 24):
        assert found["counted"] == found["formula"]
        assert min(found["counted"].values()) > 0


def test_rounds_of_a_call_are_those_of_the_sites(ranks: Any) -> None:
    """Eleven residual blocks with two norms each and the last norm, seven transformers, two ways down and two up."""
    for found in ranks.run("benchmarks.volumes:counted", 2, "sdxl", 16, 16):
        assert found["rounds"] == {"kv": 11, "moments+halo": 23, "moments": 7, "halo": 4, "prediction": 1}


def test_the_real_sdxl_takes_fifty_rounds_and_seventy_of_keys_and_values() -> None:
    assert volumes.rounds_of(*volumes.sdxl()) == (70, 50)


def test_volumes_of_the_real_sdxl_at_1024() -> None:
    """210 M elements of keys and values and 4.1 M of edge rows to each side, as the layers' sizes give them."""
    shapes = volumes.shapes_of(*volumes.sdxl())
    assert (len(shapes.attentions), len(shapes.convolutions), len(shapes.norms)) == (70, 39, 46)
    sent = volumes.bytes_sent(shapes, split_bands(128, 8, 4), 3, itemsize=2)
    assert sent["keys and values"] == 7 * 209_715_200 * 2 // 8
    assert sent["moments"] == 7 * 46 * (1 + 2 * 32) * 4
    assert sent["halo"] == pytest.approx(2 * 4.096e6, rel=0.03)  # down-sampling reads one side only
