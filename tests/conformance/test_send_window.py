"""Stale keys and values sent in the step that reads them: what the emulation says, or the same bits as a step before.

Bits are the same where nothing is both extrapolated and corrected: else owners extrapolate, who go another way.
"""

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
from patchpar.shard.stale.correction import OwnPast
from patchpar.shard.stale.send_window import NUM_BUFFERS, SendWindow
from patchpar.shard.stale.workspace import Workspace
from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.conformance.test_strategies import ThreadRank
from tests.stale.on_ranks import called_twice, image, patched
from tests.stale.runs import Run, emulated, errors, sites_of

BY_OWNERS = (
    "fresh-edges:warmup_steps=3",
    "fresh-edges:warmup_steps=1",
    "fresh-edges:warmup_steps=1,correction=linear",
)
STRATEGIES = (
    "fresh-edges:warmup_steps=2,correction=none",
    "fresh-edges:warmup_steps=3,extrapolated=false,correction=linear",
    "fresh-edges:warmup_steps=1,extrapolated=false,quality=1",
    "fresh-edges:warmup_steps=1,correction=none,quality=1",
)
EVEN, UNEVEN = (32, 8), (27, 9)
SAME = 1e-5
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


def two_images(thread_rank: Any, run: Run) -> list[list[Tensor]]:
    clock = StepClock()
    bands = patched(thread_rank, run, clock)
    return [image(bands, clock, run) for _ in range(2)]


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


@pytest.mark.parametrize(
    ("strategy", "world", "size"),
    first_of(
        [(strategy, world, size) for strategy in BY_OWNERS for world in (2, 3, 4) for size in (EVEN, UNEVEN)],
        (BY_OWNERS[1], 2, EVEN),
    ),
)
def test_owners_extrapolate_as_emulated(
    strategy: str, world: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as receivers would, nor as where nothing comes after the exact steps."""
    run = Run(strategy=strategy, size=size, evaluations=6 if "warmup_steps=3" in strategy else 4)
    emulated_run, by_receivers = emulated(run, world, by_owners=True), emulated(run, world)
    for found in on_simulated(world, one_image, run):
        assert max(errors(found, emulated_run)) <= SAME
    sent_a_step_before(monkeypatch)
    for found in on_simulated(world, one_image, run):
        assert max(errors(found, by_receivers)) <= SAME
        assert max(errors(found, emulated_run)) > 10 * SAME, errors(found, emulated_run)


@pytest.mark.breadth
@pytest.mark.usefixtures("exact_third_step")
def test_an_exact_step_keeps_the_tokens_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the above: without them the step after it has no line to extrapolate along."""
    run = replace(RESYNC, evaluations=4)
    wanted = on_simulated(2, one_image, run)
    remember = OwnPast.remember
    monkeypatch.setattr(OwnPast, "remember", lambda past, own, **_: remember(past, own, continues=False))
    for found, want in zip(on_simulated(2, one_image, run), wanted, strict=True):
        assert torch.equal(found[2], want[2])
        assert not torch.equal(found[3], want[3])


@pytest.mark.breadth
@pytest.mark.usefixtures("exact_third_step")
def test_nothing_is_left_of_the_image_before() -> None:
    for first, again in on_simulated(2, two_images, replace(RESYNC, evaluations=4)):
        assert all(torch.equal(*each) for each in zip(first, again, strict=True))


@pytest.mark.breadth
def test_branches_of_guidance_in_turns_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both receive into the same memory; one leaves a step out."""
    run = Run(strategy="fresh-edges:warmup_steps=1,correction=none", size=EVEN, evaluations=4)
    late = on_simulated(2, branches, run)
    sent_a_step_before(monkeypatch)
    for found, wanted in zip(late, on_simulated(2, branches, run), strict=True):
        assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


def test_an_exchange_that_nobody_waits_for_is_over_before_its_memory_is_used_again_and_at_the_end() -> None:
    events: list[str] = []
    window = SendWindow([Workspace() for _ in range(NUM_BUFFERS)])
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
