"""What exchange points store from one step to the next: entries by call, buckets, and when nothing may be used."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.errors import ExchangeError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.stale import message_bucket
from patchpar.shard.stale.cache import MOST_CALLS, MOST_PARKED, StaleCache
from patchpar.shard.stale.guidance_call import StaleEntry
from patchpar.shard.stale.state import StaleState
from patchpar.shard.stale.workspace import Workspace
from patchpar.strategies.displaced import DisplacedPatch
from patchpar.strategies.piped import PipedStages
from tests.unit.threads import on_threads

FORM = ("some", "shape")


def part(transport: Any, value: float, size: int = 3) -> ExchangePart:
    """One small tensor to and from the only other rank."""
    peer = 1 - transport.rank
    return ExchangePart(
        "moments", [((peer,), (torch.full((size,), value),))], {peer: (TensorSpec((size,), torch.float32),)}
    )


def memory_of(transport: Any, bucket: int = 2) -> StaleCache:
    return StaleCache(Communicator(transport), bucket)


def values(received: Any) -> list[float]:
    return [x[0].item() for tensors in received.values() for x in tensors]


def test_a_value_arrives_one_step_later() -> None:
    def run(transport: Any) -> list[list[float]]:
        memory, found = memory_of(transport), []
        for evaluation in range(4):
            memory.begin(0, evaluation, FORM)
            slot = memory.entry("norm")
            found.append(values(slot.wait()))
            slot.pending = memory.send(part(transport, 10.0 * transport.rank + evaluation), "norm", slot)
            memory.end()
        memory.settle()
        return found

    assert on_threads(2, run) == [[[], [10.0], [11.0], [12.0]], [[], [0.0], [1.0], [2.0]]]


def test_a_bucket_is_one_message_and_tells_its_parts_apart() -> None:
    def run(transport: Any) -> Any:
        memory = memory_of(transport, bucket=3)
        memory.begin(0, 0, FORM)
        parts = [part(transport, transport.rank + 10.0 * number, size=number + 1) for number in range(5)]
        waiting = [memory.send(each, "norm", memory.entry(f"norm {number}")) for number, each in enumerate(parts)]
        rounds = [memory.comm.traffic.rounds["bucket"]]
        memory.end()
        rounds.append(memory.comm.traffic.rounds["bucket"])
        found = [waiting[number]() for number in (4, 0, 2, 1, 3)]
        shapes = [len(x) for received in found for tensors in received.values() for x in tensors]
        return rounds, shapes, [values(received)[0] for received in found], memory.comm.traffic.bytes_sent["moments"]

    for rank, found in enumerate(on_threads(2, run)):
        peer = 1 - rank
        assert found == ([1, 2], [5, 1, 3, 2, 4], [peer + 10.0 * number for number in (4, 0, 2, 1, 3)], 4 * 15)


def test_buckets_that_never_return_leave_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_bucket, "MOST_MEMORIES", 4)

    def run(transport: Any) -> int:
        memory = memory_of(transport, bucket=1)
        memory.begin(0, 0, FORM)
        for number in range(10):
            memory.send(part(transport, 1.0), "norm", memory.entry(f"norm {number}"))()
        return len(memory.bucket.memories)

    assert [0 < found <= 4 for found in on_threads(2, run)] == [True] * 2


def test_a_workspace_that_has_grown_keeps_no_other_memory() -> None:
    workspace, like = Workspace(), torch.ones(1)
    small, large = (workspace.take((size,), like) for size in (2, 8))
    assert small.data_ptr() != large.data_ptr()
    assert workspace.take((2,), like).data_ptr() == large.data_ptr()


def test_a_late_value_names_the_exchange_point_that_waits_and_the_shapes() -> None:
    def run(transport: Any) -> str:
        memory = memory_of(transport)
        if transport.rank == 1:
            time.sleep(1.0)
            return ""
        memory.begin(0, 0, FORM)
        slot = memory.entry("mid.norm")
        slot.pending = memory.send(part(transport, 1.0), "mid.norm", slot)
        memory.end()
        start = time.monotonic()
        with pytest.raises(ExchangeError) as caught:
            slot.wait()
        assert 0.3 <= time.monotonic() - start < 20
        return str(caught.value)

    message, _ = on_threads(2, run, deadline=0.3)
    assert re.match(
        r"mid\.norm waits for stale values: rank 0 at end of the call: rank 1 has not answered rank 0 for "
        r"0\.3 s; expected from it: \(3,\) torch\.float32",
        message,
    )


def alone(**options: Any) -> StaleCache:
    return on_threads(1, memory_of, **options)[0]


def test_only_the_evaluation_before_is_known() -> None:
    memory = alone()
    assert [memory.begin(0, evaluation, FORM) for evaluation in (0, 1, 2, 4, 5)] == [False, True, True, False, True]
    assert not memory.begin(0, 5, FORM), "the same evaluation twice has no past of its own"


def test_calls_of_a_step_have_pasts_of_their_own() -> None:
    memory = alone()
    assert [memory.begin(call, 0, FORM) for call in (0, 1)] == [False, False]
    assert memory.begin(0, 1, FORM)
    memory.entry("conv").own = torch.ones(1)
    assert memory.begin(1, 1, FORM)
    assert memory.entry("conv").own is None
    memory.begin(0, 2, FORM)
    assert memory.entry("conv").own is not None


def test_an_exchange_point_that_is_passed_twice_has_two_slots() -> None:
    memory = alone()
    memory.begin(0, 0, FORM)
    first, second = memory.entry("conv"), memory.entry("conv")
    assert first is not second
    memory.begin(0, 1, FORM)
    assert (memory.entry("conv"), memory.entry("conv")) == (first, second)


def test_another_form_begins_anew() -> None:
    memory = alone()
    memory.begin(0, 0, FORM)
    memory.entry("conv").own = torch.ones(1)
    assert not memory.begin(0, 1, ("another", "shape"))
    assert memory.entry("conv").own is None
    assert memory.begin(0, 2, ("another", "shape"))


def begun(memory: StaleCache, evaluation: int, form: Any) -> tuple[StaleEntry, int, bool]:
    """The exchange point of a call, with the number of its memory, and whether the step before may be used."""
    usable = memory.begin(0, evaluation, form)
    entry, generation = memory.entry("norm"), memory.generation
    memory.end()
    return entry, generation, usable


def test_calls_of_two_forms_in_turn_keep_their_memory() -> None:
    """But no value of another image."""
    memory, value = alone(), torch.ones(1)
    memory.parks = True
    first, generation, _ = begun(memory, 0, FORM)
    first.put({1: [value]}, own=torch.ones(1))
    assert memory.is_another(0, "another")
    assert not memory.is_another(0, FORM)
    _, other, _ = begun(memory, 1, "another")
    assert (memory.is_kept(generation), memory.is_kept(other), other != generation) == (True, True, True)
    assert memory.num_bytes().total == value.nbytes
    assert all(x is not value for x in memory.stored()), "no graph of another form holds it"
    again, *found = begun(memory, 1, FORM)
    assert again is first
    assert (found, again.own, again.is_first) == ([generation, False], None, True)


def test_memory_of_a_bounded_number_of_forms_is_kept() -> None:
    memory, found = alone(), []
    for parks in (True, False):
        memory.parks = parks
        numbers = [begun(memory, 0, (parks, size))[1] for size in range(MOST_PARKED + 3)]
        found.append([memory.is_kept(number) for number in numbers])
    assert found == [[False] * 2 + [True] * (MOST_PARKED + 1), [False] * (MOST_PARKED + 2) + [True]]
    memory.parks = True
    last = begun(memory, 0, "last")[1]
    memory.forget_forms()
    assert not memory.is_another(0, "another"), "none is to be kept"
    begun(memory, 0, "another")
    assert [memory.is_kept(number) for number in (*numbers, last)] == [False] * (len(numbers) + 1)


@pytest.mark.parametrize("how", ["another form", "another image", "end of the image"])
def test_what_is_in_flight_is_waited_for_before_it_is_forgotten(how: str) -> None:
    memory, asked = alone(), list[str]()
    memory.begin(0, 0, FORM)
    memory.entry("conv").pending = lambda: asked.append(how) or {}  # type: ignore[func-returns-value]
    if how == "another form":
        memory.begin(0, 1, ("another", "shape"))
    elif how == "another image":
        memory.reset()
    else:
        memory.settle()
    assert asked == [how]


def test_drift_is_that_of_one_call() -> None:
    memory = alone()
    memory.measures_drift = True
    for evaluation in range(2):
        memory.begin(0, evaluation, FORM)
        assert memory.drift.tolist() == [0.0, 0.0]
        memory.drift += torch.ones(2)


def test_another_image_keeps_buffers_and_nothing_else() -> None:
    memory = alone()
    memory.begin(0, 0, FORM)
    slot = memory.entry("attention")
    slot.state, slot.own = Held(torch.ones(4)), torch.ones(1)
    memory.reset()
    assert not memory.begin(0, 1, FORM), "the last picture's evaluation 0 is not the past of this one's 1"
    assert memory.entry("attention") is slot
    assert slot.own is None, "drift is measured from it"
    assert slot.state is not None


class Held:
    """Keeps one tensor, as the state of an attention seam keeps buffers."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def tensors(self) -> Any:
        yield self.x
        yield self.x[1:]

    def arriving(self) -> Any:
        yield torch.ones(3)


def test_every_byte_is_counted_once() -> None:
    memory = alone()
    memory.begin(0, 0, FORM)
    slot = memory.entry("attention")
    slot.state, slot.own = Held(torch.ones(10)), torch.ones(3, dtype=torch.float64)
    slot.received = {1: [torch.ones(2), torch.ones(5, dtype=torch.float16)]}
    assert memory.num_bytes() == (40 + 24 + 8 + 10, 12)
    memory.workspace.take((2, 3), torch.ones(1))
    assert memory.num_bytes().total == 40 + 24 + 8 + 10 + 12 + 24


def test_pop_leaves_nothing_and_put_waits_for_what_is_pending() -> None:
    slot = StaleEntry(pending=lambda: {1: [torch.ones(1)]})
    assert values(slot.pop()) == [1.0]
    assert (dict(slot.received), slot.pending) == ({}, None)
    asked: list[int] = []
    slot.pending = lambda: asked.append(1) or {}  # type: ignore[func-returns-value]
    slot.put({2: [torch.zeros(1)]}, torch.ones(1))
    assert asked == [1]
    assert values(slot.received) == [0.0]


def test_an_exchange_point_without_values_of_this_image_is_refused() -> None:
    """A layer that a network skips in exact steps would read memory that nobody has written, or of the last image."""
    memory, policy = alone(), DisplacedPatch(warmup_steps=1).policy
    patch = LocalPatch(memory.comm, Axis("patch", 0, 2, (0, 1)), policy, cache=memory)

    def continues(evaluation: int, *layers: str) -> list[bool]:
        patch.fresh = not memory.begin(0, evaluation, FORM)
        return [entry.continues for layer in layers if (entry := patch.entry(layer, policy.context)) is not None]

    assert continues(0, "first", "middle") == [False, False]
    assert continues(1, "first", "middle") == [True, True]
    assert continues(2, "first") == [True]
    assert continues(3, "first", "middle") == [True, False]
    assert continues(3, "first") == [False], "the same once more has no past of its own"
    memory.reset()
    assert continues(0, "first") == [False]
    with pytest.raises(UnsupportedModel, match=r"^middle has not run in the exact steps of this image.*strategy=exact"):
        continues(1, "first", "middle")


def test_a_step_that_is_replayed_counts() -> None:
    """As a graph of the device: none of its exchange points is asked for."""
    memory = alone()
    for evaluation in range(3):
        memory.begin(0, evaluation, FORM)
        if evaluation == 1:
            memory.set_back(memory.snapshot())
        else:
            slot = memory.entry("attention")
    assert slot.continues


def test_calls_that_pile_up_are_refused() -> None:
    memory = alone()
    for call in range(MOST_CALLS):
        memory.begin(call, 0, FORM)
    with pytest.raises(UnsupportedModel, match="called 17 times without a scheduler step"):
        memory.begin(MOST_CALLS, 0, FORM)


def fresh_calls(steps: Sequence[Sequence[Tensor]], *, listed: bool = False) -> list[list[bool]]:
    """Which calls are exact, of steps whose calls get these texts, beside a latent that is another in each call.

    `listed`: each in a list, as networks for texts of several lengths have them.
    """

    def run(transport: Any) -> list[list[bool]]:
        clock = StepClock()
        state, found = StaleState(Communicator(transport), DisplacedPatch(warmup_steps=1).policy, clock), []
        for texts in steps:
            found.append([])
            for text in texts:
                clock.next_call()
                given = {"texts": [text]} if listed else {"text": text}
                found[-1].append(state.begin(FORM, ((torch.zeros(2),), given)))
            clock.tick()
        return found

    (found,) = on_threads(1, run)
    return found


def test_warm_up_is_counted_in_steps() -> None:
    """Of which a second-order solver evaluates each twice."""

    def run(transport: Any) -> list[bool]:
        clock = StepClock(order=2)
        state, found = StaleState(Communicator(transport), DisplacedPatch(warmup_steps=2).policy, clock), []
        for _ in range(6):
            clock.next_call()
            found.append(state.begin(FORM))
            clock.tick()
        return found

    assert on_threads(1, run) == [[True] * 4 + [False] * 2]


def test_the_length_of_a_step_is_that_of_its_own_image() -> None:
    """Whether the image before had timesteps or none; always in one tensor, which recorded steps read."""
    known, unknown = (1000.0, 900.0, 850.0), (None, None, None)

    def run(transport: Any) -> list[list[float]]:
        clock, found = StepClock(), []
        state = StaleState(Communicator(transport), PipedStages().policy, clock)
        for times in (unknown, known, unknown, known):
            clock.reset()
            state.reset()
            found.append([])
            for time_of_step in times:
                clock.next_call()
                found[-1].append(state.step_ratio(None if time_of_step is None else torch.tensor(time_of_step)).item())
                clock.tick()
        return found

    assert on_threads(1, run) == [[[0.0, 0.0, 1.0], [0.0, 0.0, 0.5]] * 2]


def test_a_state_that_begins_anew_ends_its_exchanges_as_before() -> None:
    """With the call, where steps are captured as graphs."""

    def run(transport: Any) -> list[bool]:
        state = StaleState(Communicator(transport), DisplacedPatch().policy, StepClock())
        before, state.cache.joins = state.anew().cache.joins, True
        return [before, state.anew().cache.joins]

    assert on_threads(1, run) == [[False, True]]


@pytest.mark.parametrize("listed", [False, True])
def test_a_call_with_another_text_than_in_each_step_before_is_exact(listed: bool) -> None:
    """A pipeline may stop to call the denoiser without the prompt, which it did first in each step, and begin again."""
    without, prompt = torch.zeros(1), torch.ones(1)
    both, one = [without, prompt], [prompt]
    assert fresh_calls([both, both, both, one, one, one, both, both], listed=listed) == [
        *([True, True], [False, False], [False, False]),
        *([True], [False], [False]),
        *([True, True], [False, False]),
    ]
    assert fresh_calls([both[::-1], both[::-1], one, one], listed=listed) == [
        [True, True],
        [False, False],
        [False],
        [False],
    ]


def test_texts_that_are_made_in_each_step_say_nothing() -> None:
    assert fresh_calls([[torch.zeros(1)] for _ in range(4)]) == [[True], [False], [False], [False]]
