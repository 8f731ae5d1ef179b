"""Ranks that run alike are recorded once, and what one sends is what the other waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from patchpar.errors import PlanError
from patchpar.pipeline.planner import image_ranks
from patchpar.pipeline.planner.image_ranks import ranks_of_image, unequal_pairs
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import RecordOptions
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.plan.plan import Plan
from patchpar.plan.replay.replay import Deadlock, replay
from patchpar.plan.replay.tape import Kernel, Leave, Operator, Receive, Send, Tape, Wait, bytes_sent
from patchpar.plan.replay.topology import Resource, Route, Topology, equal_ports
from tests import tiny
from tests.breadth import first_of
from tests.planner.on_ranks import call_of


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "plan", "side", "number"),
    first_of(
        [
            ("sd", "patch=4", 128, 3),
            ("sd", "cfg=2,patch=2", 64, 3),
            ("sd", "patch=6", 192, 3),
            ("sd", "cfg=2,patch=5", 160, 3),
            ("sd", "cfg=2,patch=4,strategy=exact:attention=ring", 128, 3),
            ("sd", "cfg=2,patch=2,weights=sharded", 64, 3),
            ("sd", "patch=5", 192, 5),  # bands of different sizes
            ("flux", "patch=8,strategy=exact:ulysses=2", 128, 4),  # one at each place of a group
            ("flux", "patch=6,strategy=exact:attention=ring", 192, 6),  # of text each has another number of tokens
            ("flux", "patch=6,strategy=fresh-edges", 192, 6),  # as above
            ("sd", "patch=6,strategy=fresh-edges", 192, 3),
        ],
        ("sd", "cfg=2,patch=2", 64, 3),
    ),
)
def test_tapes_of_ranks_between_are_those_recorded_for_them(name: str, plan: str, side: int, number: int) -> None:
    parsed = Plan.parse(plan)
    kwargs = call_of(name, steps=1 + ("fresh" in plan)) | {"height": side, "width": side}
    kwargs |= {} if "cfg" in plan else {"output_type": "latent"}  # with the VAE, whose bands may differ in size
    recording = Recording(tiny.build(name).pipe, parsed, kwargs)
    ranks: dict[int, RecordedRank] = {}

    def record(rank: int) -> RecordedRank:
        ranks[rank] = recording.of_rank(rank)
        return ranks[rank]

    found = ranks_of_image(parsed, record)
    assert len(ranks) == number
    inner = parsed.world_size - 2 - (parsed.cfg > 1 and parsed.patch == 2)
    own = recording.of_rank(inner)
    assert bytes_sent(found.tapes[inner]) == bytes_sent(own.tape)
    assert work(found.tapes[inner])[0] == work(own.tape)[0]
    assert work(found.tapes[inner])[1] == pytest.approx(work(own.tape)[1], rel=0.02)  # parts of a buffer differ
    replay(priced(found.tapes), equal_ports(1e9))  # without a deadlock


def priced(tapes: Sequence[Tape]) -> list[Tape]:
    return [tuple(Kernel("k", 1e-6) if isinstance(each, Operator) else each for each in tape) for tape in tapes]


@pytest.mark.parametrize(
    ("name", "plan"),
    first_of(
        [
            ("sd", "cfg=2,patch=2"),
            ("sd", "patch=4,strategy=displaced"),
            ("flux", "patch=4,strategy=exact:attention=ring"),
            ("flux", "stage=2,patch=2"),
            ("flux", "stage=2,strategy=piped"),
        ],
        ("sd", "cfg=2,patch=2"),
    ),
)
def test_operations_of_ranks_end_and_take_no_less_than_messages(name: str, plan: str) -> None:
    """As over NCCL. Ranks that come late to an operation hold the others up, and no order of theirs is a deadlock.

    Each pair of ranks has a cable: in ports that all pass, operations have a better order than messages apart.
    """
    cables = Topology(lambda a, b: Route((Resource(f"{a} to {b}", 1e9),)))
    parsed, kwargs = Plan.parse(plan), call_of(name, steps=3) | {"height": 128 if name == "sd" else 64, "width": 64}
    recording = Recording(tiny.build(name).pipe, parsed, kwargs, RecordOptions(joined=True))
    tapes = priced(ranks_of_image(parsed, recording.of_rank).tapes)
    alone = [tuple(each._replace(operation=0) if isinstance(each, Send) else each for each in tape) for tape in tapes]
    assert replay(alone, cables).seconds <= replay(tapes, cables).seconds
    operations = [{each.operation for each in tape if isinstance(each, Send)} for tape in tapes]
    left = [{each.operation for each in tape if isinstance(each, Leave)} for tape in tapes]
    assert all(0 not in begun and done and done <= begun for begun, done in zip(operations, left, strict=True))
    late = [[each for each in tape if not isinstance(each, Receive)] for tape in tapes]
    with pytest.raises(Deadlock):
        replay([tuple(late[0]), *tapes[1:]], equal_ports(1e9))


def work(tape: Tape) -> tuple[int, int]:
    operators = [entry for entry in tape if isinstance(entry, Operator)]
    return sum(each.flops for each in operators), sum(each.num_bytes for each in operators)


def tapes_of(*, num_bytes: int) -> list[Tape]:
    return [
        (Send(0, (1,), "kv", 8), Wait(0, 1, 8)),
        (Send(0, (0,), "kv", 8), Wait(0, 0, num_bytes)),
    ]


def test_a_message_of_another_size_is_found() -> None:
    assert unequal_pairs(tapes_of(num_bytes=8)) == []
    assert unequal_pairs(tapes_of(num_bytes=9)) == [(0, 1)]


def test_ranks_that_exchange_with_ranks_of_all_axes_are_recorded_themselves() -> None:
    """As in a VAE, whose bands are those of all ranks of an image."""
    recorded, plan = Recording(tiny.build("sd").pipe, Plan(), call_of("sd", steps=1)).of_rank(0), Plan(cfg=2, patch=4)

    def record(rank: int) -> RecordedRank:
        others = [each for each in range(8) if each != rank]
        sends = (Send(0, (each,), "vae", 8 + rank) for each in others)
        return replace(recorded, tape=(*sends, *(Wait(0, each, 8 + each) for each in others)))

    assert ranks_of_image(plan, record).tapes == tuple(record(rank).tape for rank in range(8))


def test_ranks_that_do_not_match_although_recorded_are_refused() -> None:
    recorded = Recording(tiny.build("sd").pipe, Plan(), call_of("sd", steps=1)).of_rank(0)
    with pytest.raises(PlanError, match=r"ranks \[0, 1\] of plan patch=2"):
        ranks_of_image(Plan(patch=2), lambda rank: replace(recorded, tape=tapes_of(num_bytes=9)[rank]))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("exact", [0, 4, 4, 4, 4, 4, 4, 7]),
        ("exact:ulysses=8", [0, 4, 4, 4, 4, 4, 4, 7]),
        ("exact:attention=ring:ulysses=2", [0, 5, 4, 5, 4, 5, 4, 7]),
        ("exact:attention=ring:ulysses=4", [0, 5, 6, 3, 4, 5, 6, 7]),
    ],
)
def test_a_rank_of_a_group_is_like_one_at_the_same_place(strategy: str, expected: list[int]) -> None:
    plan = Plan(patch=8, strategy=strategy)
    assert [image_ranks._sources(plan, rank).steps for rank in range(8)] == expected
