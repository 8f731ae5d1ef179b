"""Quantised differences: sender and receiver hold the same, nothing is lost for long, and few bits stay few."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchpar.shard.stale.quantized_delta import QuantizedDelta

BITS = pytest.mark.parametrize("bits", [8, 4])


def tokens(seed: int, width: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 5, 3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 8])
def test_sender_and_receiver_hold_the_same(bits: int, dtype: torch.dtype, width: int) -> None:
    before = tokens(0, width, dtype)
    sender, receiver = QuantizedDelta(before.clone(), bits), QuantizedDelta(before.clone(), bits)
    for step in range(1, 6):
        receiver.decode(sender.encode(before + 0.1 * tokens(step, width, dtype)))
        assert torch.equal(sender.copy, receiver.copy)
        assert receiver.copy.dtype == dtype


@BITS
def test_off_by_half_a_level_at_most(bits: int) -> None:
    before, now = tokens(0), tokens(1)
    residual = QuantizedDelta(before.clone(), bits)
    residual.encode(now)
    level = (now - before).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((residual.copy - now).abs() <= 0.51 * level).all()
    assert not torch.equal(residual.copy, now)


@BITS
def test_what_rounding_leaves_out_follows(bits: int) -> None:
    """Towards values that stay the copy closes in, by at least the number of levels each time."""
    residual, goal = QuantizedDelta(tokens(0).clone(), bits), tokens(1)
    errors = []
    for _ in range(3):
        residual.encode(goal)
        errors.append(float((residual.copy - goal).norm()))
    most = 2 ** (bits - 1) - 1
    assert errors[1] < errors[0] / most
    assert errors[2] <= max(errors[1] / most, 1e-3)  # levels are at least 2**-14 apart


@BITS
def test_the_error_does_not_pile_up(bits: int) -> None:
    residual, x = QuantizedDelta(tokens(0).clone(), bits), tokens(0)
    errors = []
    for step in range(1, 40):
        x = x + 0.1 * tokens(step)
        residual.encode(x)
        errors.append(float((residual.copy - x).norm()))
    assert max(errors[20:]) < 2 * max(errors[:10])


@BITS
@pytest.mark.parametrize("width", [7, 8])
def test_a_message_is_what_is_announced(bits: int, width: int) -> None:
    residual = QuantizedDelta(tokens(0, width).clone(), bits)
    sent, specs = residual.encode(tokens(1, width)), residual.specs()
    assert [(tuple(x.shape), x.dtype) for x in sent] == [(spec.shape, spec.dtype) for spec in specs]
    levels = 2 * 5 * 3 * (width if bits == 8 else (width + 1) // 2)
    assert sum(spec.num_bytes for spec in specs) == levels + 2 * 5 * 3 * 2


@BITS
def test_nothing_new_moves_nothing(bits: int) -> None:
    residual = QuantizedDelta(tokens(0).clone(), bits)
    residual.encode(tokens(0))
    assert torch.equal(residual.copy, tokens(0))


@BITS
@pytest.mark.parametrize("size", [1e-7, 6e4])
def test_tiny_and_huge_differences_stay_finite(bits: int, size: float) -> None:
    residual = QuantizedDelta((tokens(0) * 0).half(), bits)
    goal = (tokens(1).sign() * size).half()
    for _ in range(4):
        residual.encode(goal)
    assert residual.copy.isfinite().all()
    assert (residual.copy.float() - goal.float()).abs().max() <= max(2.0**-14, 1e-2 * size)


@BITS
def test_one_outlier_spoils_its_own_head_only(bits: int) -> None:
    now = tokens(0).clone()
    now[0, 0, 0, 0] += 1000
    now[1:] += 0.01
    residual = QuantizedDelta(tokens(0).clone(), bits)
    residual.encode(now)
    assert float((residual.copy - now)[1:].abs().max()) < 0.01 / (2 ** (bits - 1) - 1)


@BITS
def test_the_copy_lies_where_it_was(bits: int) -> None:
    """It may be a place in a buffer that attention reads."""
    buffer = torch.zeros(2, 9, 3, 7)
    residual = QuantizedDelta(buffer.narrow(1, 2, 5), bits)
    residual.encode(tokens(1))
    assert buffer[:, 2:7].any()
    assert not buffer[:, :2].any()
    assert not buffer[:, 7:].any()
