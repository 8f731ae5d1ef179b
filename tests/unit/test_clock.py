"""The one clock: steps, and denoiser calls within a step."""

from __future__ import annotations

from patchpar.clock import StepClock


def test_calls_start_anew_with_every_step() -> None:
    clock = StepClock()
    seen = []
    for calls in (1, 2, 3):
        seen.append((clock.step, [clock.next_call() for _ in range(calls)]))
        clock.tick()
    assert seen == [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])]


def test_reset_goes_back_to_before_the_first_call() -> None:
    clock = StepClock()
    clock.next_call()
    clock.tick()
    clock.reset(guided=True)
    assert clock == StepClock(step=0, call=-1, guided=True)
