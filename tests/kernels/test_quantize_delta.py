"""Quantised differences that have come, added by one kernel: bit for bit what the sender keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.shard.kernels.quantize_delta import add_delta_eager, launch_add_delta, quantize_delta
from tests.breadth import first_of

HALF = torch.float16
CASES = [
    (bits, dtype, width) for bits in (8, 4) for dtype in (torch.float32, HALF, torch.bfloat16) for width in (7, 64)
]
CHOSEN = first_of(CASES, (8, torch.float32, 64), (8, torch.bfloat16, 64), (4, HALF, 7))


def tokens(dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    """A copy and tokens that have changed little, by nothing, by halves of a level, and by much."""
    torch.manual_seed(0)
    copy = torch.randn(37, 2, 3, width)
    x = copy + 0.05 * torch.randn_like(copy)
    x[0] = copy[0]
    x[1] = copy[1] + torch.arange(width) / 2
    x[2], copy[2] = -6e4, 6e4
    return copy.to(dtype), x.to(dtype)


def sent_and_kept(copy: Tensor, x: Tensor, bits: int) -> list[Tensor]:
    return [*quantize_delta(copy, x, bits), copy]


def added(add: Callable[..., None], copy: Tensor, levels: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The copy, to which the messages of three ranks are added, with one token of nobody between two of them."""
    spans = ((0, 12), (12, 20), (21, 37))
    starts = [start for start, _ in spans]
    add(copy, *([x[start:end] for start, end in spans] for x in (levels, scale)), starts, bits)
    return copy


@pytest.mark.parametrize(("bits", "dtype", "width"), CHOSEN)
def test_the_receiver_has_the_bits_of_the_sender(
    interpreted: Callable[..., Any], bits: int, dtype: torch.dtype, width: int
) -> None:
    copy, x = tokens(dtype, width)
    x[20] = copy[20]
    levels, scale, kept = sent_and_kept(copy.clone(), x, bits)
    received = interpreted(added, launch_add_delta, copy.clone(), levels, scale, bits)
    if dtype == torch.bfloat16:  # which the interpreter does not round as GPUs do, but cuts
        torch.testing.assert_close(received, kept, rtol=2.0**-7, atol=0)
    else:
        assert torch.equal(bits_of(received), bits_of(kept))
    assert torch.equal(bits_of(added(add_delta_eager, copy.clone(), levels, scale, bits)), bits_of(kept))


def bits_of(x: Tensor) -> Tensor:
    """Its bytes: zeros have a sign."""
    return x.contiguous().view(torch.uint8)


def test_another_scale_would_be_seen(interpreted: Callable[..., Any]) -> None:
    """Control: a head whose scale is one step of fp16 off keeps other tokens."""
    copy, x = tokens(torch.float32, 7)
    levels, scale, kept = sent_and_kept(copy.clone(), x, 8)
    scale[5, 0, 0] = torch.nextafter(scale[5, 0, 0], torch.tensor(1.0, dtype=HALF))
    assert not torch.equal(interpreted(added, launch_add_delta, copy.clone(), levels, scale, 8), kept)


def test_a_token_of_no_rank_is_left_alone(interpreted: Callable[..., Any]) -> None:
    copy, x = tokens(torch.float32, 7)
    levels, scale, kept = sent_and_kept(copy.clone(), x, 8)
    for found in (
        interpreted(added, launch_add_delta, copy.clone(), levels, scale, 8),
        added(add_delta_eager, copy.clone(), levels, scale, 8),
    ):
        assert torch.equal(found[20], copy[20])
        assert not torch.equal(kept[20], copy[20]), "control"
