"""Texts of their own lengths in a list: a ControlNet's share of the batch is filled up less than the whole is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.coverage.pipelines.zoo import ZOO
from patchpar.comm.async_tensor import AsyncMessage
from patchpar.errors import VerificationError
from patchpar.shard.batch import Batch
from patchpar.shard.verification import with_noise_for_zeros
from tests import tiny
from tests.breadth import first_of
from tests.tensors import relative
from tests.tokens.piped import Builder, plain, shared

TOLERANCE = 1e-5
NAME = "ZImageControlNetPipeline"


def of_zoo(name: str) -> tiny.Tiny:
    pipe, call = ZOO[name].make()
    return tiny.Tiny(name=name, pipe=pipe, call_kwargs=call)


def of_two_prompts(name: str) -> tiny.Tiny:
    """With a list of its own, which the pipeline changes."""
    found = of_zoo(name)
    return replace(
        found, call_kwargs=found.call_kwargs | {"prompt": ["a red house", "two tall pines by a lake at noon"]}
    )


CASES = [
    (NAME, of_zoo, {}),
    (NAME, of_zoo, {"controlnet_conditioning_scale": 0.0}),  # checked with noise for residuals that are zeros
    (NAME, of_two_prompts, {"num_images_per_prompt": 2}),
    ("ZImageControlNetInpaintPipeline", of_zoo, {}),
]


@pytest.mark.parametrize(("name", "build", "options"), first_of(CASES, CASES[0], CASES[1]))
def test_a_controlnet_with_texts_of_their_own_lengths(
    name: str, build: Builder, options: dict[str, Any], tmp_path: Path
) -> None:
    want = plain(name, build=build, **options)
    for got in shared(name, "cfg=2", tmp_path, build=build, **options):
        assert relative(got, want) <= TOLERANCE


def test_a_part_with_the_lengths_of_the_whole_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchpar.comm.async_tensor.AsyncTensor.part_shapes", None)
    with pytest.raises(VerificationError, match="ZImageTransformer2DModel with its batch shared between 2 ranks"):
        shared(NAME, "cfg=2", tmp_path, build=of_zoo)


def test_parts_are_padded_where_they_are_joined() -> None:
    batch = Batch(2, by_item=True)
    whole, parts = {0: torch.randn(2, 5, 3)}, [{0: torch.randn(1, 3, 3)}, {0: torch.randn(1, 5, 3)}]
    joined = batch.join(parts)[0]
    assert torch.equal(joined[:1, :3], parts[0][0])
    assert not joined[:1, 3:].any()
    assert torch.equal(joined[1:], parts[1][0])
    compared = batch.as_joined(whole, parts)[0]
    assert torch.equal(compared[:1, :3], whole[0][:1, :3])
    assert not compared[:1, 3:].any()
    assert torch.equal(compared[1:], whole[0][1:])


def test_a_whole_async_tensor_is_cut_to_the_shapes_of_its_parts() -> None:
    whole, shapes = torch.zeros(2, 5, 3), ((1, 3, 3), (1, 5, 3))

    def async_whole() -> Tensor:
        return AsyncMessage(
            [((2, 5, 3), torch.float32)], torch.device("cpu"), lambda: [whole], [whole[:1, :3]], [shapes]
        ).tensors[0]

    batch = Batch(2, by_item=True)
    assert batch.part(async_whole(), 0, 2).shape == (1, 3, 3)  # what this rank has
    kept = async_whole()
    assert not kept.any()
    assert [batch.part(kept, rank, 2).shape for rank in range(2)] == [(1, 3, 3), (1, 5, 3)]
    noisy = with_noise_for_zeros(((kept,), {}))
    assert noisy is not None
    assert [batch.part(noisy[0][0], rank, 2).shape for rank in range(2)] == [(1, 3, 3), (1, 5, 3)]
    assert noisy[0][0].any()
