"""The one clock: steps, and denoiser calls within a step."""

from __future__ import annotations

from patchpar.plan.step_clock import StepClock


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
    assert clock == StepClock(evaluation=0, call=-1, guided=True)


def test_two_evaluations_make_a_step_of_a_scheduler_of_order_two() -> None:
    clock, seen = StepClock(), []
    clock.reset(order=2)
    for _ in range(5):
        seen.append((clock.evaluation, clock.step))
        clock.tick()
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
    clock.reset()
    assert (clock.order, clock.step) == (1, 0)
