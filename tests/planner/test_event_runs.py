"""Events that are noted again as runs have the tape and the bytes of the same events one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.pipeline.planner.call_log import Event, Noted
from patchpar.pipeline.planner.event_runs import EventRun, in_runs
from patchpar.pipeline.planner.tape_recorder import TapeRecorder
from patchpar.plan.replay.tape import Operator

PHASES = ("encode", "denoise", "decode")


def events(seed: int) -> list[Event]:
    """Operators, bytes that come and go, buffers of kernels, and phases."""
    chance, found, alive = random.Random(seed), list[Event](), 0
    for number in range(200):
        kind = chance.random()
        if kind < 0.4:
            found.append(Operator(f"operator {number}", "float32", number, number))
        elif kind < 0.9:
            size = chance.randint(-alive, 1000)
            alive += size
            found.append(size)
        elif kind < 0.95:
            found.append(Noted(LiveBytes, "work", (chance.randint(1, 2000),)))
        else:
            found.append(Noted(LiveBytes, "enter", (chance.choice(PHASES),)))
    return found


def noted(found: Sequence[Any]) -> tuple[Any, ...]:
    """The tape, and the bytes of each phase."""
    tape, memory = TapeRecorder(), LiveBytes("encode")
    memory.peaks.clear()
    memory.working.clear()
    for event in found:
        if isinstance(event, EventRun):
            tape.operators(event.operators)
            memory.change_all(event.num_bytes, event.most)
        elif isinstance(event, Operator):
            tape.operator(event)
        elif isinstance(event, int):
            memory.change(event)
        else:
            getattr(memory, event.name)(*event.args)
    return tape.tape, memory.peaks, memory.working, memory.alive


def test_runs_have_the_tape_and_the_bytes_of_their_events() -> None:
    for seed in range(50):
        each = events(seed)
        assert noted(list(in_runs(each))) == noted(each)


def test_a_run_ends_at_any_other_event() -> None:
    one, two, other = Operator("one", "", 0, 0), Operator("two", "", 0, 0), Noted(TapeRecorder, "block", ("b",))
    assert list(in_runs([one, 5, -7, two, other, other, -1])) == [
        EventRun((one, two), -2, 5),
        other,
        other,
        EventRun((), -1, None),
    ]


def test_the_most_of_a_run_is_not_what_it_ends_with() -> None:
    """The control: its sum alone would miss the peak."""
    each = [100, -100]
    (run,) = in_runs(each)
    assert isinstance(run, EventRun)
    assert noted([EventRun(run.operators, run.num_bytes, None)]) != noted(each)
