"""Ranks that share a step give the stream of one process up to rounding, and each keeps its part of the window only."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.errors import PlanError
from patchpar.models.streaming.causal.causal_wan import BlockInputs
from patchpar.models.streaming.causal.step_sharding import See, ShardedFrames, StepGroup
from patchpar.plan.mesh import Axis
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.stage_loop import StageLoop
from patchpar.stream.events import Reference
from patchpar.stream.stage import FinishedBlock, StageIO
from tests.breadth import first_of
from tests.stream.running import BLOCKS, Outcome, Script, serial, stage
from tests.stream.test_stages import EVERYTHING
from tests.stream.tiny import AUDIO, COLUMNS, FRAMES, ROWS, causal, num_bytes, run_of, sink, speech, stream, text
from tests.tensors import noise
from tests.unit.threads import on_threads

TOKENS = ROWS * COLUMNS // 4  # of a frame
GENERATING = threading.Lock()
"""Weights are drawn from a generator of all threads."""


class NotReading(StepGroup):
    """The negative control: in attention, keys and values of the others' tokens are zero."""

    def of_frames(self, frames: int, tokens: int) -> ShardedFrames:
        shared = super().of_frames(frames, tokens)
        return UnreadFrames(comm=shared.comm, axis=shared.axis, frames=shared.frames, bands=shared.bands)


class UnreadFrames(ShardedFrames):
    def attend(self, where: str, qkv_BlNd: tuple[Tensor, Tensor, Tensor], see: See) -> Tensor:
        start, size = self.bands.starts[self.axis.rank], self.bands.size(self.axis.rank)

        def own(x: Tensor) -> Tensor:
            frames = torch.zeros_like(x).unflatten(1, (self.frames, -1))
            frames[:, :, start : start + size] = x.unflatten(1, (self.frames, -1))[:, :, start : start + size]
            return frames.flatten(1, 2)

        return ShardedFrames.attend(self, where, qkv_BlNd, lambda q, k, v: see(q, own(k), own(v)))


def part(transport: Transport, ranks: Sequence[int], kind: type[StepGroup] = StepGroup) -> StepGroup | None:
    if len(ranks) == 1:
        return None
    return kind(Communicator(transport), Axis("inner", ranks.index(transport.rank), len(ranks), tuple(ranks)))


def on_rank(transport: Transport, plan: StreamPlan, script: Script, kind: type[StepGroup], options: Any) -> Outcome:
    inner = part(transport, plan.stages[plan.stage_of(transport.rank)].ranks, kind)
    with GENERATING:
        model = stream(plan.steps, inner=inner, **options)
    return stage(transport, {transport.rank: model}, plan, script)[0]


def shared(plan: StreamPlan, script: Script, kind: type[StepGroup] = StepGroup, **options: Any) -> Outcome:
    found = on_threads(plan.ranks, on_rank, plan, script, kind, options, deadline=60.0)
    errors = [error for error in found if isinstance(error, Exception)]
    if errors:
        raise errors[0]
    return found[plan.decoder]


def apart(one: Outcome, other: Outcome) -> float:
    """How far latents are apart, in units of the largest; images may differ by one level."""
    assert len(one) == len(other)
    for (_, frames), (_, wanted) in zip(one, other, strict=True):
        assert int((frames.int() - wanted.int()).abs().max()) <= 1
    return latents_apart(one, other)


def latents_apart(one: Outcome, other: Outcome) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for (a, _), (b, _) in zip(one, other, strict=True))


PLANS = [
    StreamPlan(sizes=(1, 1), inner=2, decode="own"),
    StreamPlan(sizes=(1, 1), inner=2, decode="last"),
    StreamPlan(sizes=(1,), inner=3, decode="own"),  # 4 heads: 2, 1 and 1
    StreamPlan(sizes=(1,), inner=4, decode="last"),  # 6 tokens of a frame: 2, 2, 1 and 1
]


@pytest.mark.parametrize("plan", first_of(PLANS, *PLANS[1:3]), ids=str)
def test_ranks_that_share_a_step_make_the_stream_of_one_process(plan: StreamPlan) -> None:
    """Not to the last bit: a matrix product of fewer rows may round otherwise."""
    outcome = shared(plan, Script(EVERYTHING), heads=4)
    assert apart(outcome, serial(stream(plan.steps, heads=4), EVERYTHING)) < 1e-5


@pytest.mark.parametrize(
    "options",
    first_of(
        [{"positions": "relative"}, {"sampler": "renoise"}, {"has_sink": False}, {"window": 1}],
        {"positions": "relative"},
    ),
    ids=str,
)
def test_every_kind_of_model(options: dict[str, Any]) -> None:
    outcome = shared(StreamPlan(sizes=(1, 1), inner=2), Script(EVERYTHING), **options)
    assert apart(outcome, serial(stream(2, **options), EVERYTHING)) < 1e-5


def test_speakers_on_ranks_that_share_a_step() -> None:
    """Each rank has the masks of its own tokens. Every token has another part of both voices, so that a shift is seen.

    The control: the speakers change places in mid-stream.
    """
    left = torch.linspace(0, 1, TOKENS).view(ROWS // 2, COLUMNS // 2)
    masks = torch.stack([left, 1 - left])
    changes = {0: (Reference(latents=sink(1), masks=masks),), 3: (Reference(latents=sink(2), masks=masks.flip(0)),)}

    def voices(block: int) -> tuple[Tensor, ...]:
        return (speech(block, 2),)

    outcome = shared(PLANS[0], Script(changes, hears=voices), speakers=2)
    assert apart(outcome, serial(stream(2, speakers=2), changes, hears=voices)) < 1e-5
    staying = {**changes, 3: (Reference(latents=sink(2)),)}
    assert latents_apart(outcome, serial(stream(2, speakers=2), staying, hears=voices)) > 1e-3


def test_without_the_others_tokens_it_is_another_stream() -> None:
    outcome = shared(PLANS[0], Script({}), NotReading)
    assert latents_apart(outcome, serial(stream(2), {})) > 1e-3


def test_each_rank_keeps_its_heads_only() -> None:
    def held(transport: Transport) -> int:
        with GENERATING:
            net = causal(inner=part(transport, range(2)))
        return num_bytes(net.memory(ROWS, COLUMNS))

    whole = num_bytes(causal().memory(ROWS, COLUMNS))
    assert on_threads(2, held) == [whole // 2, whole // 2]


def sent(transport: Transport, window: int) -> dict[str, int]:
    """Bytes that this rank sends for the last of several blocks."""
    inner = part(transport, range(2))
    assert inner is not None
    with GENERATING:
        net = causal(window=window, inner=inner, hears=False)
    memory, traffic = net.memory(ROWS, COLUMNS), inner._comm.traffic
    for block in range(4):
        traffic.clear()
        net.velocity(memory, noise(1, 16, FRAMES, ROWS, COLUMNS), text(0), BlockInputs(block, 500.0))
    return dict(traffic.bytes_sent)


def test_what_is_sent_does_not_grow_with_the_window() -> None:
    """Of 2 ranks each sends half of its queries, keys, values and results in each of 2 layers, and its output."""
    width, own_tokens, out = 24, FRAMES * TOKENS // 2, 16 * 4
    wanted = {"heads": 2 * 4 * own_tokens * width // 2 * 4, "tokens": own_tokens * out * 4}
    for window in (1, 3):
        assert on_threads(2, sent, window) == [wanted, wanted]


def test_whether_a_block_is_wanted_is_told_by_one_rank() -> None:
    """The others hear of a cancellation sooner or later; nobody waits for what they do not compute."""

    def run(transport: Transport) -> Outcome:
        outcome: Outcome = []

        def put(finished: FinishedBlock) -> None:
            outcome.append((finished.latents[0], finished.frames))

        around = StageIO(order=script.order, put=put, is_cancelled=lambda: transport.rank in (1, 3))
        inner = part(transport, plan.stages[plan.stage_of(transport.rank)].ranks)
        with GENERATING:
            model = stream(2, inner=inner)
        StageLoop(model, plan, transport.rank, Communicator(transport), around, run_of()).run()
        return outcome

    plan, script = StreamPlan(sizes=(1, 1), inner=2, decode="last"), Script({})
    found = on_threads(4, run, deadline=10.0)
    assert apart(found[2], serial(stream(2), {})) < 1e-5


def test_a_stage_of_several_ranks_can_be_cancelled() -> None:
    cancelled = threading.Event()

    def run(transport: Transport) -> Any:
        def put(finished: FinishedBlock) -> None:
            decoded.append(finished.block)
            cancelled.set()

        around = StageIO(order=Script({}, blocks=1000).order, put=put, is_cancelled=cancelled.is_set)
        inner = part(transport, plan.stages[plan.stage_of(transport.rank)].ranks)
        with GENERATING:
            model = stream(2, inner=inner)
        return StageLoop(model, plan, transport.rank, Communicator(transport), around, run_of()).run()

    plan, decoded = PLANS[0], list[int]()
    found = on_threads(plan.ranks, run, deadline=10.0)
    assert [one for one in found if isinstance(one, Exception)] == []
    assert decoded == [0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(StepGroup.heads, heads=2), "2: use at most inner=2"),
        (partial(StepGroup.of_frames, frames=1, tokens=2), "a frame of 2 tokens cannot be split among 3"),
    ],
)
def test_what_cannot_be_shared(make: Any, message: str) -> None:
    def refused(transport: Transport) -> str:
        with pytest.raises(PlanError, match=message) as caught:
            make(StepGroup(Communicator(transport), Axis("inner", transport.rank, 3, (0, 1, 2))))
        return str(caught.value)

    assert len(set(on_threads(3, refused))) == 1


def test_the_tiny_model_is_what_the_counts_above_say() -> None:
    assert (AUDIO.dim, TOKENS, BLOCKS) == (24, 6, 6)
