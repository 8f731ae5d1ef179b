"""Steps on ranks of their own give the very bits that one process gives, whatever happens in mid-stream."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.errors import ExchangeError, PlanError
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.stage_loop import StageLoop
from patchpar.stream.events import Change, Parameter, Prompt, Reference
from patchpar.stream.messages import BeginBlock
from patchpar.stream.stage import FinishedBlock, Order, StageIO
from tests.breadth import first_of
from tests.stream.running import BLOCKS, Script, differing, pipelined, serial, stage
from tests.stream.tiny import run_of, sink, speech, stream, text
from tests.unit.threads import on_threads

EVERYTHING: dict[int, tuple[Change, ...]] = {
    2: (Prompt(text=text(1)),),
    3: (Prompt(text=text(2), transition="recache"), Parameter(name="audio_scale", value=2.0)),
    4: (Reference(latents=sink(1)), Prompt(text=text(3), transition="blend", over=2)),
}
PLANS = [StreamPlan.even(steps, ranks) for steps in (1, 2, 3, 4) for ranks in range(1, steps + 2)]


@pytest.mark.parametrize("plan", first_of(PLANS, PLANS[0], PLANS[3], PLANS[-4], PLANS[-1]), ids=str)
def test_every_plan_gives_the_bits_of_one_process(plan: StreamPlan) -> None:
    """The window of 3 blocks wraps, the sink rolls and adapts, each block has its sound, text and sink change."""
    make = partial(stream, plan.steps)
    outcome, figures = pipelined(make, plan, Script(EVERYTHING))
    assert differing(outcome, serial(make(), EVERYTHING)) == []
    assert [one.blocks for one in figures] == [BLOCKS] * plan.ranks


@pytest.mark.parametrize(
    "options",
    first_of(
        [
            {"dtype": torch.bfloat16},
            {"positions": "relative"},
            {"sampler": "renoise"},
            {"has_sink": False},
            {"adapt_sink": False},
            {"window": 1},
        ],
        {"positions": "relative"},
        {"sampler": "renoise"},
        {"has_sink": False},
    ),
    ids=str,
)
def test_every_kind_of_model(options: dict[str, Any]) -> None:
    make = partial(stream, 2, **options)
    outcome, _ = pipelined(make, StreamPlan.even(2, 3), Script(EVERYTHING))
    assert differing(outcome, serial(make(), EVERYTHING)) == []


def test_without_audio() -> None:
    make = partial(stream, 2, hears=False)
    outcome, _ = pipelined(make, StreamPlan.even(2, 3), Script({}, hears=False))
    assert differing(outcome, serial(make(), {}, hears=False)) == []


@pytest.mark.parametrize(
    ("transition", "block"),
    [*first_of([("recache", block) for block in range(5)], ("recache", 1), ("recache", 2)), ("switch", 1), ("cut", 2)],
)
def test_a_prompt_may_change_at_any_phase(transition: Any, block: int) -> None:
    make = partial(stream, 2)
    changes = {block: (Prompt(text=text(1), transition=transition),)}
    outcome, _ = pipelined(make, StreamPlan.even(2, 3), Script(changes))
    assert differing(outcome, serial(make(), changes)) == []


def test_uneven_steps_and_rests_change_nothing() -> None:
    make = partial(stream, 3)
    script = Script(EVERYTHING, rests={1: 1, 2: 3, 5: 2})
    outcome, _ = pipelined(make, StreamPlan.even(3, 4), script, 0.02)
    assert differing(outcome, serial(make(), EVERYTHING)) == []
    assert not any(script.rests.values())


def test_every_event_shows_from_its_block_on() -> None:
    """Without it the stream is another one, from that block and not before."""
    changes: list[Change] = [
        Prompt(text=text(1)),
        Prompt(text=text(1), transition="blend", over=2),
        Prompt(text=text(0), transition="cut"),
        Prompt(text=text(0), transition="recache"),
        Reference(latents=sink(1)),
        Parameter(name="audio_scale", value=0.5),
    ]
    without = serial(stream(2), {})
    for change in changes:
        assert differing(serial(stream(2), {4: (change,)}), without) == [4, 5], change
    with_it, _ = pipelined(partial(stream, 2), StreamPlan.even(2, 3), Script({4: (changes[0],)}))
    assert differing(with_it, without) == [4, 5]


def test_the_adaptive_sink_shows_from_the_block_that_enters_when_the_first_is_done() -> None:
    for steps in (1, 3):
        adapted, _ = pipelined(partial(stream, steps), StreamPlan.even(steps, steps + 1), Script({}))
        fixed = serial(stream(steps, adapt_sink=False), {})
        assert differing(adapted, fixed) == list(range(steps, BLOCKS))


def test_a_reference_given_meanwhile_is_not_overruled() -> None:
    changes = {1: (Reference(latents=sink(1)),)}
    outcome, _ = pipelined(partial(stream, 3), StreamPlan.even(3, 4), Script(changes))
    assert differing(outcome, serial(stream(3, adapt_sink=False), changes)) == []


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_short_stream_ends_well(blocks: int) -> None:
    make = partial(stream, 3)
    outcome, figures = pipelined(make, StreamPlan.even(3, 4), Script({}, blocks=blocks))
    assert differing(outcome, serial(make(), {}, blocks=blocks)) == []
    assert [one.blocks for one in figures] == [blocks] * 4


def test_a_stream_without_a_block_leaves_nothing_behind() -> None:
    """One that is cancelled at once, or whose audio ends before it begins: the next one is as it would have been."""
    plan, models = StreamPlan.even(2, 3), {rank: stream(2) for rank in range(3)}

    def twice(transport: Any) -> Any:
        assert stage(transport, models, plan, Script({}, blocks=0))[0] == []
        return stage(transport, models, plan, Script({}, blocks=3))[0]

    *_, outcome = on_threads(3, twice, deadline=60.0)
    assert differing(outcome, serial(stream(2), {}, blocks=3)) == []


def test_what_is_cancelled_passes_uncomputed_and_leaves_nothing_behind() -> None:
    """The next stream on the same lines is the stream that it would have been."""
    plan, cancelled, credit = StreamPlan.even(2, 3), threading.Event(), threading.Semaphore(6)
    models, decoded = {rank: stream(2) for rank in range(3)}, []

    def order(block: int, patience: float) -> Order:
        return BeginBlock(inputs=(speech(block),), updates=()) if credit.acquire(timeout=0.05) else None

    def put(finished: FinishedBlock) -> None:
        decoded.append(finished.block)
        cancelled.set()

    def twice(transport: Any) -> Any:
        around = StageIO(order=order, put=put, is_cancelled=cancelled.is_set)
        StageLoop(models[transport.rank], plan, transport.rank, Communicator(transport), around, run_of()).run()
        return stage(transport, models, plan, Script(EVERYTHING))[0]

    *_, outcome = on_threads(3, twice, deadline=60.0)
    assert decoded == [0]
    assert differing(outcome, serial(stream(2), EVERYTHING)) == []


def test_a_stage_that_fails_is_noticed_by_all() -> None:
    def failing(transport: Any) -> Any:
        if transport.rank == 1:
            transport.close()
            raise RuntimeError("out of memory")
        return stage(transport, models, StreamPlan.even(2, 3), Script({}, blocks=1000))

    models = {rank: stream(2) for rank in range(3)}
    first, second, third = on_threads(3, failing)
    assert isinstance(second, RuntimeError)
    assert isinstance(third, ExchangeError)
    assert "rank 1 is gone" in str(third)
    assert isinstance(first, ExchangeError)


def test_a_stage_that_is_late_is_noticed_within_the_deadline() -> None:
    def silent(transport: Any) -> Any:
        return None if transport.rank == 0 else stage(transport, {1: model}, StreamPlan.even(1, 2), Script({}))

    model = stream(1)

    _, error = on_threads(2, silent, deadline=0.3)
    assert isinstance(error, ExchangeError)
    assert "0.3 s" in str(error)


def test_texts_of_different_lengths_cannot_be_blended() -> None:
    model = stream(2)
    with pytest.raises(PlanError, match="cannot be blended"):
        model.apply(model.new_state(0), Prompt(text=text(1)[:, :2], transition="blend", over=1))
