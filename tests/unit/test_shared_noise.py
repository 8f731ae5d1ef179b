"""What the first rank samples is what all ranks get, for all that torch samples with; and what is for one rank only."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

ON_RANKS = "tests.unit.noise_on_ranks"


@pytest.mark.parametrize("by_default", [False, True])
def test_all_that_samples_is_shared_and_the_state_too(ranks: Any, by_default: bool) -> None:
    found = ranks.run(f"{ON_RANKS}:shared", 3, by_default)
    alone = ranks.run(f"{ON_RANKS}:apart", 3, by_default)
    first, *others = [values for values, _ in found]
    assert first[:-1] == alone[0][0][:-1], "the first one's own"
    for values in others:
        assert values[: len(values) - 1] == first[:-1]
    assert all(num_bytes > 0 for _, num_bytes in found)


@pytest.mark.parametrize("by_default", [False, True])
def test_control_generators_of_another_type_are_each_ranks_own(ranks: Any, by_default: bool) -> None:
    found = ranks.run(f"{ON_RANKS}:apart", 3, by_default)
    assert all(num_bytes == 0 for _, num_bytes in found)
    assert found[0][0] != found[1][0]


def test_a_rank_that_is_missed(ranks: Any) -> None:
    for message in ranks.run(f"{ON_RANKS}:left_out", 3)[:2]:
        assert re.search(r"at noise 1 \(rand\): rank 2 (has not answered|is gone)", message)


def test_ranks_that_sample_different_numbers_are_refused(ranks: Any) -> None:
    """Else those of the first would be taken for what another distribution gives."""
    for message in ranks.run(f"{ON_RANKS}:differently", 3):
        assert "rank 1 rand (3,) float32, rank 2 randn (3,) float32" in message


def test_noise_of_a_vae_in_bands_is_of_the_whole_image(ranks: Any) -> None:
    whole = torch.randn(4, 1, generator=torch.Generator().manual_seed(0)).flatten().tolist()
    assert ranks.run(f"{ON_RANKS}:in_bands", 2) == [whole[:2], whole[2:]]


def test_networks_that_run_on_one_rank_sample_there(ranks: Any) -> None:
    own = torch.Generator().manual_seed(10)
    encoded, decoded = torch.randn(3, generator=own).tolist(), torch.randn(1, 2, 8, 8, generator=own)
    first, other = ranks.run(f"{ON_RANKS}:on_one_rank", 2, 1)
    assert first == [encoded, decoded.flatten()[:3].tolist(), 0]
    assert other == [encoded, [0.0, 0.0, 0.0], 0]


def test_networks_that_run_on_one_rank_of_each_image_are_refused(ranks: Any) -> None:
    """On all ranks: the noise of the second image would be that of another GPU."""
    for encoded, decoded, num_bytes in ranks.run(f"{ON_RANKS}:on_one_rank", 2, 2):
        assert "let the CPU sample it" in encoded
        assert "or data=1" in decoded
        assert num_bytes == 0


def test_what_nobody_uses_is_not_sent(ranks: Any) -> None:
    for num_bytes, refusal in ranks.run(f"{ON_RANKS}:in_vain", 2):
        assert num_bytes == 0
        assert "one rank of each image samples (rand)" in refusal
