"""Stages of a stream on GPUs keep NCCL's rules, and give the bits of one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest

from patchpar.comm.collectives import Communicator
from patchpar.comm.device_links import DeviceLinks, form_links
from patchpar.comm.transport import LinkTransport
from patchpar.models.streaming.causal.step_sharding import StepGroup
from patchpar.plan.mesh import Axis
from patchpar.plan.stream_plan import StreamPlan
from tests.breadth import first_of
from tests.conformance.host_messages import HostMessages, Sent
from tests.conformance.nccl import SimulatedCommunicator
from tests.conformance.stand_in import RankGroup, StandIn
from tests.conformance.turns import Deadlock
from tests.stream.running import Outcome, Script, differing, serial, stage
from tests.stream.test_fifo import PLANS as FIFO_PLANS
from tests.stream.test_fifo import on_rank as fifo_on_rank
from tests.stream.test_fifo import plain, script
from tests.stream.test_inner import GENERATING, apart
from tests.stream.test_stages import EVERYTHING
from tests.stream.tiny import stream

PLANS = [StreamPlan.even(2, 2), StreamPlan.even(2, 3), StreamPlan.even(3, 2), StreamPlan.even(4, 5)]
BLOCK = sum(spec.num_bytes for spec in stream(2).payload())
"""Bytes of a block; no header and no change has as many."""


def links_of(plan: StreamPlan, *more: tuple[int, int]) -> DeviceLinks:
    sets = tuple(tuple(each.ranks) for each in plan.stages if len(each.ranks) > 1)
    return DeviceLinks(pairs=(*plan.links, *more), sets=sets)


def on_gpus(
    stand_in: StandIn, links: DeviceLinks, cards: Sequence[str], function: Callable[[LinkTransport], Any]
) -> list[tuple[Any, list[int]]]:
    """What `function` returns on each rank, or raises, and the sizes of its messages through the host's memory."""
    sent: Sent = defaultdict(list)

    def live(_: Any) -> Any:
        rank = stand_in.rank.number
        host: Any = HostMessages(rank, stand_in, sent)
        transport = LinkTransport(host, "nccl", cards[rank])
        form_links(Communicator(transport), range(len(cards)), links)
        host.sizes.clear()
        return function(transport), host.sizes

    return stand_in.run(live)


def streamed(plan: StreamPlan, cards: Sequence[str], blocks: int = 6) -> tuple[list[Any], StandIn]:
    make, stand_in = partial(stream, plan.steps), StandIn(plan.ranks)
    models = {rank: make() for rank in range(plan.ranks)}
    rests = Script(EVERYTHING, blocks=blocks, rests={1: 1, 3: 2})
    links = links_of(plan, (plan.finisher, 0))
    return on_gpus(stand_in, links, cards, lambda each: stage(each, models, plan, rests)), stand_in


@pytest.mark.parametrize("plan", first_of(PLANS, PLANS[1]), ids=str)
def test_latents_go_from_device_to_device(plan: StreamPlan) -> None:
    found, stand_in = streamed(plan, [f"gpu {rank}" for rank in range(plan.ranks)])
    assert stand_in.faults == []
    (outcome, _), _ = found[-1]
    assert differing(outcome, serial(stream(plan.steps), EVERYTHING)) == []
    names = {each.name for each in stand_in.communicators if each.num_posted and each.name.startswith("from")}
    assert len(names) == plan.ranks, "each link has a group of its own, and so has the first block's way back"
    assert not any(BLOCK in sizes for _, sizes in found), "only headers and changes go through the host"


def test_a_stream_that_ends_at_once_leaves_nothing_in_the_links() -> None:
    found, stand_in = streamed(PLANS[1], ["gpu 0", "gpu 1", "gpu 2"], blocks=0)
    assert stand_in.faults == []
    assert found[-1][0][0] == []


def test_stages_on_one_gpu_use_the_hosts_memory() -> None:
    plan = PLANS[1]
    found, stand_in = streamed(plan, ["gpu 0", "gpu 1", "gpu 1"])
    assert stand_in.faults == []
    (outcome, _), _ = found[-1]
    assert differing(outcome, serial(stream(plan.steps), EVERYTHING)) == []
    assert [sizes.count(BLOCK) for _, sizes in found] == [0, 6, 0]


def test_in_one_group_for_all_links_the_stages_wait_for_one_another() -> None:
    """The control: the first block's way back holds up the blocks that it has to wait for."""
    plan = PLANS[0]
    together: list[SimulatedCommunicator] = []

    def one_group(stand_in: StandIn, store: Any, own: Any) -> Any:
        if not together:
            together.append(SimulatedCommunicator("one", (0, 1), stand_in.faults))
            stand_in.communicators.append(together[0])
        return Directed(together[0], stand_in, own.ranks)

    with mock.patch.object(StandIn, "_standalone", one_group):
        found, _ = streamed(plan, ["gpu 0", "gpu 1"])
    assert any(isinstance(getattr(each, "__cause__", None), Deadlock) for each in found), found


class Directed(RankGroup):
    """Two ranks as sender and receiver, whichever is first in the communicator."""

    def __init__(self, communicator: SimulatedCommunicator, stand_in: StandIn, ranks: tuple[int, ...]) -> None:
        super().__init__(communicator, stand_in)
        object.__setattr__(self, "ranks", ranks)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return super().send(tensors, self.ranks[to], tag)  # type: ignore[attr-defined]

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return super().recv(tensors, self.ranks[source], tag)  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_cards", first_of([True, False], True))
def test_ranks_of_one_step_never_go_through_the_host(has_cards: bool) -> None:
    """The first rank of a step forwards headers and changes, and the others send nothing there; else everything."""
    plan = StreamPlan(sizes=(1, 1), inner=2, decode="own")
    cards = [f"gpu {rank if has_cards else 0}" for rank in range(plan.ranks)]

    def live(transport: LinkTransport) -> Outcome:
        ranks = plan.stages[plan.stage_of(transport.rank)].ranks
        axis = Axis("inner", ranks.index(transport.rank), len(ranks), tuple(ranks))
        with GENERATING:
            group = StepGroup(Communicator(transport), axis) if len(ranks) > 1 else None
            model = stream(2, inner=group)
        return stage(transport, {transport.rank: model}, plan, Script({}))[0]

    stand_in = StandIn(plan.ranks)
    found = on_gpus(stand_in, links_of(plan, (plan.finisher, 0)), cards, live)
    assert stand_in.faults == []
    assert apart(found[-1][0], serial(stream(2), {})) < 1e-5
    assert [not found[rank][1] for rank in (1, 3)] == [has_cards] * 2
    assert [BLOCK in found[rank][1] for rank in (0, 2)] == [not has_cards] * 2


@pytest.mark.parametrize("plan", first_of(FIFO_PLANS[1:], FIFO_PLANS[1]), ids=str)
def test_a_queue_of_frames_on_gpus(plan: StreamPlan) -> None:
    back = [(receiver, sender) for sender, receiver in plan.links]
    stand_in = StandIn(plan.ranks)
    orders = {rank: script() for rank in range(plan.ranks)}
    found = on_gpus(
        stand_in,
        links_of(plan, *back),
        [f"gpu {rank}" for rank in range(plan.ranks)],
        lambda each: fifo_on_rank(each, plan, orders[each.rank], False, {}),
    )
    assert stand_in.faults == []
    assert differing(found[plan.decoder][0], plain()) == []
