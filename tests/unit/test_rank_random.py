"""Random states of a call: what a seed sets, and what it leaves to others of the process."""

from __future__ import annotations

import pytest
import torch

from patchpar.pipeline.caller_random import sampled_seed
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


def test_the_seed_of_a_job_follows_from_its_generator() -> None:
    """Some pipelines sample noise from torch's default generator too: jobs with equal generators have equal images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state, given = torch.get_rng_state(), torch.Generator().manual_seed(7)
        seed = sampled_seed({"prompt": "a fox", "generator": [given, torch.Generator().manual_seed(8)]})
        assert 0 <= seed < 2**62
        assert seed == sampled_seed({"generator": torch.Generator().manual_seed(7)})
        assert torch.equal(given.get_state(), torch.Generator().manual_seed(7).get_state()), "it does not move on"
        torch.rand(1, generator=given)
        others = {sampled_seed({"generator": given}), sampled_seed({"generator": torch.Generator().manual_seed(8)})}
        assert len(others | {seed, 7}) == 4
        assert torch.equal(torch.get_rng_state(), state)
        without = sampled_seed({"prompt": "a fox", "generator": None})
        assert without == int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(0)))
