"""Which calls are alike, so that what was verified for one holds for the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchpar.shard.verification import arguments_of, call_signature


def call(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(1, 4, 8, 8),), {"timestep": 900, "use_cross_timestep": False, "num_frames": 3} | changes


@pytest.mark.parametrize(
    "change", [{"use_cross_timestep": True}, {"num_frames": 4}, {"timestep": torch.zeros(1)}, {"added": 2}]
)
def test_what_changes_the_computation_is_another_call(change: dict[str, Any]) -> None:
    """Also a switch that has "timestep" in its name: LTX-2's, which gives each token a time of its own."""
    assert call_signature(call(**change)) != call_signature(call())
    assert arguments_of(call(**change)) != arguments_of(call())


@pytest.mark.parametrize("step", [1, 12.5])
def test_another_step_is_the_same_call(step: float) -> None:
    assert call_signature(call(timestep=step)) == call_signature(call())
    assert arguments_of(call(timestep=step)) == arguments_of(call())
