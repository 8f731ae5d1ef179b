"""Stale keys and values sent in the step that reads them: the same bits as sent a step before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.transport import Transport
from patchpar.plan.resync import ResyncDecider
from patchpar.plan.step_clock import StepClock
from patchpar.shard.attention import stale
from patchpar.shard.attention.late_tokens import LateTokens
from patchpar.shard.stale import send_window
from patchpar.shard.stale.send_window import NUM_BUFFERS, SendWindow
from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.conformance.test_strategies import ThreadRank
from tests.stale.on_ranks import called_twice, image, patched
from tests.stale.runs import Run, sites_of

STRATEGIES = (
    "fresh-edges:warmup_steps=3",
    "fresh-edges:warmup_steps=1,correction=linear",
    "fresh-edges:warmup_steps=2,correction=none",
    "fresh-edges:warmup_steps=1,extrapolated=false",
    "fresh-edges:warmup_steps=1,quality=1",
)
EVEN, UNEVEN = (32, 8), (27, 9)
RESYNC = Run(strategy="fresh-edges:warmup_steps=1,quality=1", size=EVEN, evaluations=5)


@pytest.fixture(scope="module", autouse=True)
def probed_once() -> None:
    sites_of("sd")


def on_simulated(world: int, function: Any, run: Run) -> list[Any]:
    """What `function(place, run)` returns on each rank of NCCL's simulator, which finds no fault."""
    stand_in = StandIn(world)
    found = stand_in.run(lambda transport: function(ThreadRank(transport, world), run))
    assert [each for each in found if isinstance(each, BaseException)] == []
    assert stand_in.faults == []
    return found


def sent_a_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the transport has no operations of all ranks."""
    monkeypatch.setattr(stale, "collectives_of", lambda *_: None)


def one_image(thread_rank: Any, run: Run) -> list[Tensor]:
    clock = StepClock()
    bands = patched(thread_rank, run, clock)
    found = image(bands, clock, run)
    states = [entry.state for entry in bands.history.cache._call.entries.values()]  # type: ignore[union-attr]
    assert any(isinstance(state, LateTokens) for state in states) == (
        stale.collectives_of(*of(thread_rank)) is not None
    )
    return found


def of(thread_rank: ThreadRank) -> tuple[Transport, Any]:
    return thread_rank.transport, thread_rank.mesh(patch=thread_rank.world)["patch"].ranks


def branches(thread_rank: Any, run: Run) -> list[Tensor]:
    return [x for branch in called_twice(thread_rank, run, 2) for x in branch]


@pytest.fixture
def exact_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resynchronise after two steps, and later twice in a row."""
    due = {2, 4, 5}
    decided: dict[int, tuple[int, Any]] = {}  # with the decider, so that no later one gets its id

    def next_is_fresh(decider: Any, *_: Any, **__: Any) -> bool:
        count = decided.get(id(decider), (0, decider))[0] + 1
        decided[id(decider)] = count, decider
        return count in due

    monkeypatch.setattr(ResyncDecider, "next_is_fresh", next_is_fresh)


@pytest.mark.parametrize(
    ("strategy", "world", "size"),
    first_of(
        [(strategy, world, size) for strategy in STRATEGIES for world in (2, 3, 4) for size in (EVEN, UNEVEN)],
        (STRATEGIES[0], 2, EVEN),
    ),
)
@pytest.mark.usefixtures("exact_third_step")
def test_late_messages_change_no_bit(
    strategy: str, world: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up of several steps, steps of other lengths, and exact steps in between."""
    run = Run(strategy=strategy, size=size, evaluations=6)
    late = on_simulated(world, one_image, run)
    sent_a_step_before(monkeypatch)
    for found, wanted in zip(late, on_simulated(world, one_image, run), strict=True):
        assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("exact_third_step")
def test_an_exact_step_needs_the_tokens_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the above: without them the step after it extrapolates from older ones."""
    run = replace(RESYNC, evaluations=4)
    wanted = on_simulated(2, one_image, run)
    monkeypatch.setattr(LateTokens, "needs_last", lambda *_, **__: False)
    monkeypatch.setattr(LateTokens, "_step_back", lambda *_: None)
    for found, want in zip(on_simulated(2, one_image, run), wanted, strict=True):
        assert not torch.equal(found[3], want[3])


@pytest.mark.breadth
def test_branches_of_guidance_in_turns_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both receive into the same memory; one leaves a step out."""
    run = Run(strategy="fresh-edges:warmup_steps=1", size=EVEN, evaluations=4)
    late = on_simulated(2, branches, run)
    sent_a_step_before(monkeypatch)
    for found, wanted in zip(late, on_simulated(2, branches, run), strict=True):
        assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


def test_an_exchange_that_nobody_waits_for_is_over_before_its_memory_is_used_again_and_at_the_end() -> None:
    events: list[str] = []
    window = SendWindow(send_window.ReceiveMemory())
    for name in range(NUM_BUFFERS + 2):
        window.add(
            send_window.LateExchange(
                lambda _, name=name: events.append(f"start {name}"), lambda name=name: events.append(f"drop {name}")
            )
        )
    window.begin()
    window.reach(0)
    assert events == [f"start {name}" for name in range(NUM_BUFFERS)]
    del events[:]
    window.reach(1)
    window.end()
    left = range(1, NUM_BUFFERS + 1)
    assert events == ["drop 0", f"start {NUM_BUFFERS}", *(f"drop {name}" for name in left)]
