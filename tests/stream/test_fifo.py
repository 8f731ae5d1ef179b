"""A queue of frames spread over ranks gives the very bits of one loop over one list, whatever happens in mid-stream."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.streaming.decoder import DecoderState, WanDecoder, as_pixels
from patchpar.models.streaming.fifo.network import WanFrames
from patchpar.models.streaming.fifo.queue import FifoOptions, generate_first_video
from patchpar.models.streaming.flow_schedule import FlowSchedule, keyed_noise
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.events import Change, Prompt
from patchpar.stream.fifo.stage import FifoModel, FifoStage, StageNeighbours
from patchpar.stream.messages import StreamRun
from patchpar.stream.stage import FinishedBlock, StageIO
from tests.breadth import first_of
from tests.stream.running import Outcome, Script, differing
from tests.stream.tiny import COLUMNS, ROWS, text, transformer, vae
from tests.tensors import noise
from tests.unit.threads import on_threads

QUEUE = FifoOptions(window=4, partitions=2, first_steps=3)
FRAME = (1, 16, 1, ROWS, COLUMNS)
TOKENS = ROWS * COLUMNS // 4
BLOCKS, SEED = 4, 7
START = Prompt(text=text(0), negative=text(9))
PLANS = [StreamPlan.even(QUEUE.zones, ranks) for ranks in range(1, QUEUE.zones + 2)]
GENERATING = threading.Lock()
"""Weights are drawn from a generator of all threads."""


def run(**other: Any) -> StreamRun:
    size = {"rows": ROWS, "columns": COLUMNS}
    return StreamRun(**{"ranks": 1, "seed": SEED, "first_block": 0, "adapt_sink": False, **size, **other})


def model(queue: FifoOptions = QUEUE, **other: Any) -> FifoModel:
    with GENERATING:
        return FifoModel(WanFrames(transformer()), WanDecoder(vae()), queue, run(**other))


# --- the oracle: one list, one loop, plain calls of the transformer ---------------------------------------------------


def sample_noise(frame: int, index: int) -> Tensor:
    return keyed_noise(SEED, frame, index, FRAME)


def predicted(net: Any, x: Tensor, levels: list[float], prompt: Prompt, scale: float) -> Tensor:
    """One timestep for each token."""
    timesteps = torch.tensor([1000 * level for level in levels]).repeat_interleave(TOKENS)[None]
    found = net(x, timesteps, prompt.text, return_dict=False)[0]
    if scale == 1:
        return found
    away = net(x, timesteps, prompt.negative, return_dict=False)[0]
    return away + scale * (found - away)


@torch.no_grad()
def plain(
    blocks: int = BLOCKS,
    prompts: Mapping[int, Prompt] | None = None,
    queue: FifoOptions = QUEUE,
    scale: float = 1.0,
) -> Outcome:
    """(latents, images) of each frame. `prompts`: switches, by the block that enters."""
    net, prompt, f, n = transformer(), START, queue.window, queue.levels
    table = FlowSchedule.shifted(n, shift=queue.shift).sigmas
    steps = FlowSchedule.shifted(queue.first_steps, shift=queue.shift).sigmas
    video = torch.cat([sample_noise(i, 0) for i in range(f)], 2)
    for now, after in pairwise(steps):
        video = video + (after - now) * predicted(net, video, [now] * f, prompt, scale)
    clean = [video[:, :, i : i + 1] for i in range(f)]
    line, gone = [], [clean[0]] * (f // 2)
    for time in range(n):
        number = time - (n - f)
        level = table[n - time]
        generated = sample_noise(number, 1) if number >= 0 else sample_noise(0, 2 + time)
        line.append((1 - level) * clean[max(0, number)] + level * generated)
    before = [0.0] * (f // 2) + list(reversed(table[:-1]))  # levels in the order of time, at the start of a tick
    after = [0.0] * (f // 2) + list(reversed(table[1:]))
    for block in range(f, blocks + n):
        prompt = (prompts or {}).get(block, prompt)
        gone.append(line.pop(0))
        line.append(sample_noise(block, 0))
        seen, line = gone[-(f // 2) :] + line, []
        for start in range(0, n, f // 2):
            levels = before[start : start + f]
            velocity = predicted(net, torch.cat(seen[start : start + f], 2), levels, prompt, scale)
            for i in range(f // 2, f):
                line.append(seen[start + i] + (after[start + i] - levels[i]) * velocity[:, :, i : i + 1])
    displayed = gone[f // 2 + n - f :][:blocks]
    decoder, state = WanDecoder(vae()), DecoderState()
    return [(frame, as_pixels(decoder.decode(state, frame))) for frame in displayed]


# --- the same on ranks ------------------------------------------------------------------------------------------------


def on_rank(
    transport: Transport, plan: StreamPlan, script: Script, not_reading: bool, given: Mapping[str, Any]
) -> Outcome:
    outcome: Outcome = []

    def put(finished: FinishedBlock) -> None:
        assert finished.block == len(outcome), "frames come out in order"
        outcome.append((finished.latents[0], finished.frames))

    around = StageIO(order=script.order, put=put, is_cancelled=lambda: False)
    stage = FifoStage(model(**given), plan, transport.rank, Communicator(transport), around)
    if not_reading:
        stage._neighbours = NotReading(stage._neighbours)
    stage.run()
    return outcome


class NotReading(StageNeighbours):
    """The negative control: what a neighbour says is not heard."""

    def __init__(self, other: StageNeighbours) -> None:
        for name, value in vars(other).items():
            setattr(self, name, value)

    def receive(self) -> Tensor | None:
        heard = super().receive()
        return None if heard is None else torch.zeros_like(heard)


def script(changes: Mapping[int, tuple[Change, ...]] | None = None, blocks: int = BLOCKS, **other: Any) -> Script:
    changes = changes or {}
    return Script({**changes, 0: (START, *changes.get(0, ()))}, blocks=blocks, hears=False, **other)


def spread(plan: StreamPlan, script: Script, *, not_reading: bool = False, **given: Any) -> Outcome:
    found = on_threads(plan.ranks, on_rank, plan, script, not_reading, given, deadline=60.0)
    errors = [error for error in found if isinstance(error, Exception)]
    if errors:
        raise errors[0]
    return found[plan.decoder]


@pytest.mark.parametrize("plan", first_of(PLANS, PLANS[1], PLANS[-1]), ids=str)
def test_every_plan_gives_the_bits_of_one_loop(plan: StreamPlan) -> None:
    assert differing(spread(plan, script()), plain()) == []


@pytest.mark.parametrize("queue", [FifoOptions(window=6, partitions=1, first_steps=2)], ids=str)
def test_another_queue(queue: FifoOptions) -> None:
    outcome = spread(StreamPlan.even(queue.zones, 2), script(), queue=queue)
    assert differing(outcome, plain(queue=queue)) == []


def test_guidance_and_another_prompt() -> None:
    """A prompt holds in all windows from the tick on in which its block enters."""
    other = Prompt(text=text(1), negative=text(8))
    outcome = spread(PLANS[2], script({6: (other,)}, blocks=7), guidance_scale=3.0)
    assert differing(outcome, plain(7, {6: other}, scale=3.0)) == []
    assert differing(outcome, plain(7, scale=3.0)) == list(range(7))


def test_a_prompt_that_changes_within_the_first_video_holds_from_the_first_tick_on() -> None:
    other = Prompt(text=text(1))
    assert differing(spread(PLANS[1], script({2: (other,)})), plain(prompts={QUEUE.window: other})) == []


def test_a_blend_goes_over_tick_by_tick() -> None:
    other = Prompt(text=text(1), transition="blend", over=2)
    half, whole = Prompt(text=torch.lerp(text(0), text(1), 0.5)), Prompt(text=torch.lerp(text(0), text(1), 1.0))
    outcome = spread(PLANS[1], script({6: (other,)}, blocks=7))
    assert differing(outcome, plain(7, {6: half, 7: whole})) == []


def test_without_the_neighbours_frames_it_is_another_stream() -> None:
    assert differing(spread(PLANS[1], script(), not_reading=True), plain()) == [0, 1, 2, 3]
    assert differing(spread(PLANS[0], script(), not_reading=True), plain()) == []  # who has no neighbour misses nothing


def test_another_seed_is_another_stream() -> None:
    assert differing(spread(PLANS[0], script(), seed=8), plain()) == [0, 1, 2, 3]


@pytest.mark.parametrize("blocks", first_of([0, 1, 3], 1))
def test_a_short_stream_ends_well(blocks: int) -> None:
    """What comes out does not depend on when the stream ends: there is always noise behind the last frame."""
    assert differing(spread(PLANS[2], script(blocks=blocks)), plain(blocks)) == []
    assert differing(plain(blocks), plain()[:blocks]) == []


def test_rests_change_nothing() -> None:
    assert differing(spread(PLANS[1], script(rests={0: 2, 2: 1})), plain()) == []


def test_an_interrupted_stream_begins_with_another_video() -> None:
    """From its first frame on it is a stream of its own, with the noise of its own frames."""
    outcome: Outcome = []
    orders = Script({2: (START,)}, blocks=4, hears=False)
    around = StageIO(
        order=orders.order,
        put=lambda finished: outcome.append((finished.latents[0], finished.frames)),
        is_cancelled=lambda: False,
    )
    FifoStage(model(first_block=2), PLANS[0], 0, None, around).run()
    assert len(outcome) == 2
    assert differing(outcome, plain()[:2]) == [0, 1]


class Impatient:
    """Somebody who cancels after `looks` looks of whatever rank."""

    def __init__(self, looks: int) -> None:
        self._left = looks

    def is_cancelled(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.mark.parametrize("looks", [3, 60])
def test_what_is_cancelled_leaves_nothing_behind(looks: int) -> None:
    """In the first video or later; the next stream on the same lines is the stream that it would have been."""
    watcher, decoded, endless = Impatient(looks), list[int](), script(blocks=1000)

    def twice(transport: Transport) -> Outcome:
        around = StageIO(
            order=endless.order,
            put=lambda finished: decoded.append(finished.block),
            is_cancelled=watcher.is_cancelled,
        )
        FifoStage(model(), PLANS[2], transport.rank, Communicator(transport), around).run()
        return on_rank(transport, PLANS[2], script(), False, {})

    *_, outcome = on_threads(3, twice, deadline=30.0)
    assert len(decoded) < 20
    assert differing(outcome, plain()) == []


def test_only_neighbours_talk_and_say_little() -> None:
    """In a tick: one frame to the cleaner side, half a window less one to the noisier, however long the queue is."""

    def sent(transport: Transport) -> dict[str, int]:
        comm = Communicator(transport)
        around = StageIO(order=orders.order, put=lambda finished: None, is_cancelled=lambda: False)
        FifoStage(model(queue), plan, transport.rank, comm, around).run()
        return dict(+comm.traffic.bytes_sent)

    frame, header = 16 * ROWS * COLUMNS * 4, 4 * 8
    for partitions in (2, 3):
        queue = FifoOptions(window=4, partitions=partitions, first_steps=1)
        plan, orders = StreamPlan.even(queue.zones, 3), script()
        first, middle, last = on_threads(3, sent, deadline=30.0)
        ticks = BLOCKS + queue.levels - queue.window
        events = first["event"]
        messages = BLOCKS + queue.levels + 1  # ticks, frames of the first video, and the end
        blocks = {"block": messages * header, "payload": (messages - 1) * frame, "event": events}
        assert first == blocks
        context = (1 + ticks) * (queue.half - 1) * frame
        assert middle == blocks | {"context": context}
        assert last == {"context": context}


def test_the_first_video_is_that_of_diffusers() -> None:
    """A level for each token is that level for all of them; diffusers' own scheduler and one timestep as the oracle."""
    net, schedule = transformer(), FlowSchedule.shifted(3, shift=3.0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=list(schedule.sigmas[:-1]))
    start = noise(1, 16, 4, ROWS, COLUMNS)
    wanted = start
    for step, timestep in enumerate(scheduler.timesteps):
        found = net(wanted, timestep.expand(1), text(0), return_dict=False)[0]
        assert float(timestep) == pytest.approx(schedule.timestep(step), rel=1e-5)
        wanted = scheduler.step(found, timestep, wanted, return_dict=False)[0]
    video = generate_first_video(QUEUE, start, lambda x, s: predicted(net, x, list(s), START, 1.0), lambda: True)
    assert float((video - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_levels_differ_frame_by_frame() -> None:
    """The transformer is told what level each frame is at: other levels, another prediction, and at that frame most."""
    net, x = transformer(), noise(1, 16, 4, ROWS, COLUMNS)
    one, other = (predicted(net, x, levels, START, 1.0) for levels in ([0.5] * 4, [0.5, 0.5, 0.9, 0.5]))
    moved = (one - other).abs().amax((0, 1, 3, 4))
    assert int(moved.argmax()) == 2


def test_what_cannot_be() -> None:
    stream = model()
    with pytest.raises(PlanError, match="even number of latent frames"):
        FifoOptions(window=5)
    with pytest.raises(PlanError, match="at least 1 of each"):
        FifoOptions(partitions=0)
    stream.apply(START)
    with pytest.raises(PlanError, match="cannot be blended"):
        stream.apply(Prompt(text=text(1)[:, :2], transition="blend", over=1))
    net = transformer()
    net.register_to_config(in_channels=36)
    with pytest.raises(UnsupportedModel, match="text-to-video"):
        WanFrames(net)
