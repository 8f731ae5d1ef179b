"""Attention processors that compute attention themselves, whoever wrote them: exact in bands as well."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.breadth import first_of
from tests.exact.test_denoisers import check, odd_size

ON_RANKS = "tests.exact.on_ranks"
CASES = [
    ("sd", "products"),
    ("sd", "sliced"),
    ("sd", "custom diffusion"),
    ("sdxl", "cosines"),
    ("sdxl", "one head"),
    ("sdxl", "fused"),
    ("svd", "products"),
    ("unconditional", "products"),
    ("added_keys", "products, added keys"),
    ("added_keys", "sliced"),
]


@pytest.mark.parametrize(("name", "change"), first_of(CASES, ("sdxl", "cosines")))
def test_in_bands(ranks: Any, name: str, change: str) -> None:
    """Rows on two ranks, columns on three: the keys are everybody's, in the order of the whole image."""
    for world, size in ((2, (12, 8)), (3, odd_size(name, 3)[::-1])):
        for found in ranks.run(f"{ON_RANKS}:parity", world, name, [size], "auto", None, change):
            check(found)


@pytest.mark.parametrize("strategy", ["displaced", "fresh-edges", "pcpp"])
def test_keys_of_the_last_step_are_refused_in_words(ranks: Any, strategy: str) -> None:
    for text in ranks.run(f"{ON_RANKS}:refused_with", 2, "sd", "sliced", strategy):
        says = rf"UnsupportedModel: .*attn1: strategy {strategy}.* stale keys .*SlicedAttnProcessor.*use strategy exact"
        assert re.match(says, text), text
        assert "hooks are left" not in text


def test_what_is_refused_is_left_as_it_was(ranks: Any) -> None:
    for text in ranks.run(f"{ON_RANKS}:refused_with", 2, "sd", "replicate", "exact"):
        assert re.match(r"UnsupportedModel: conv_out pads with 'replicate'", text), text
        assert "hooks are left" not in text
