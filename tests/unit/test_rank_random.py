"""Random states of a call: what a seed sets, and what it leaves to others of the process."""

from __future__ import annotations

import pytest
import torch

from patchpar.pipeline.messages import RandomState
from patchpar.pipeline.rank_random import take_random_state
from tests.launch.fake_gpus import FakeGpus, pretend


@pytest.mark.parametrize(
    ("device", "log"), [("cpu", []), ("cuda:1", ["enter cuda:1", 3, "leave cuda:1"])], ids=["cpu", "cuda"]
)
def test_a_seed_is_for_the_cpu_and_the_ranks_own_device(
    monkeypatch: pytest.MonkeyPatch, device: str, log: list[object]
) -> None:
    """Not for other GPUs of the process, whose states nobody restores."""
    seen: list[object] = []
    gpus = pretend(monkeypatch, FakeGpus(["A", "B"]))
    gpus.log, gpus.manual_seed = seen, seen.append  # type: ignore[assignment, attr-defined]
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: seen.append("all GPUs"))
    with torch.random.fork_rng(devices=[]):
        take_random_state(RandomState(seed=3), torch.device(device))
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert seen == log
