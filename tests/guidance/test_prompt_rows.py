"""A denoiser call with our prompts, made one for all: where our rows are, and what stands in those of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchpar.shard.batch import Batch
from patchpar.strategies.data.prompt_check import FILLED, PromptRows
from patchpar.strategies.data.split import PromptSlice


def images(*seeds: int) -> torch.Tensor:
    return torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@pytest.mark.parametrize(
    ("seeds", "prompts", "total", "positions"),
    [
        ((1,), (1, 2, 3), 3, (1,)),
        ((1, 2, 1, 2), (1, 3, 3), 6, (1, 2, 4, 5)),  # two prompts, two guidance branches
        ((1, 2, 3, 4), (0, 1, 2), 8, (0, 1, 2, 3)),  # four images of a prompt
        ((1, 1), (2, 4, 4), 4, (2, 3)),  # two prompts with the same latents
    ],
)
def test_where_they_are(seeds: tuple[int, ...], prompts: Any, total: int, positions: Any) -> None:
    """In each guidance branch at their position among all prompts."""
    rows = PromptRows.of(PromptSlice(*prompts), images(*seeds))
    assert rows is not None
    assert (rows.total, rows.positions) == (total, positions)
    assert [rows.sources()[position] for position in positions] == list(range(len(seeds)))
    assert rows.cut(2 * total, 2 * len(seeds)) == [2 * position + at for position in positions for at in (0, 1)]
    assert rows.cut(total + 1, len(seeds)) is None


def test_a_call_for_some_of_our_prompts_is_not_known() -> None:
    assert PromptRows.of(PromptSlice(0, 2, 4), images(1)) is None


def test_other_rows_hold_other_numbers() -> None:
    """Of images and texts, in tensors and lists; a timestep, a size, or what belongs to no prompt is as it was."""
    sample, text, time, table = images(1, 2), torch.randn(2, 5, 3), torch.tensor([7.0, 7.0]), torch.randn(9, 3)
    rows = PromptRows.of(PromptSlice(1, 3, 3), sample)
    assert rows is not None
    call = (sample,), {"text": text, "time": time, "table": table, "texts": [text[0], text[1]], "count": 3}
    (whole,), found = Batch.of(sample).at_rows(call, rows.sources(), rows.factors())
    assert torch.equal(whole[1:], sample)
    assert torch.equal(whole[0], FILLED * sample[0])
    assert torch.equal(found["text"], torch.stack([FILLED * text[0], text[0], text[1]]))
    assert torch.equal(torch.stack(found["texts"]), found["text"])
    assert torch.equal(found["time"], torch.full((3,), 7.0))
    assert found["table"] is table
    assert found["count"] == 3
    assert torch.equal(rows.ours_in([whole], by_item=False)[0], sample)
    assert torch.equal(torch.stack(rows.ours_in(found["texts"], by_item=True)), text)
