"""The events of a rank made of those of recorded ranks at places of the same kind, with their peers moved.

As `image_ranks` moves the entries of tapes, and in the order in which the rank itself would note them: exchanges go to
the nearest ranks first, or to all in order. Where the order of a recorded rank does not tell which, nothing is made.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from patchpar.pipeline.planner.call_log import AttentionForm, LoggedAttention, Noted
from patchpar.pipeline.planner.event_runs import EventRun
from patchpar.pipeline.planner.image_ranks import SourcesOfRank, mesh_of_image, moved_peer
from patchpar.pipeline.planner.tape_recorder import Begun, Expected
from patchpar.plan.plan import Plan

Entry = EventRun | Noted | LoggedAttention
OF_PEERS = ("send", "expect", "wait")
"""What is noted once for each rank of an exchange."""


class NotAlikeError(Exception):
    """A rank is not known to note what another one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedPeers:
    """Rank `rank` in the place of rank `source`. `peers`: by those of `source`; but for sends at points `to_root`."""

    source: int
    rank: int
    peers: Mapping[int, int]
    to_root: frozenset[str] = frozenset()

    def of(self, event: Noted) -> int:
        """Return the peer of an event of OF_PEERS."""
        peer = peer_of(event)
        return peer if event.name == "send" and event.args[3] in self.to_root else self.peers[peer]


def moved_events(
    plan: Plan, rank: int, source: SourcesOfRank, events: Mapping[int, Sequence[Entry]]
) -> tuple[Entry, ...]:
    """Return the events of a rank, whose steps and decoding are those of `source`. `events`: of these, by rank.

    Raises NotAlikeError.
    """
    size = plan.world_size // plan.data
    (front, before), (other, back) = _divided(events[source.steps]), _divided(events[source.decode])
    if source.steps != source.decode and (_bytes_of(front) != _bytes_of(other) or _is_pending(before)):
        raise NotAlikeError
    if source.steps != source.decode and _is_pending(back):
        raise NotAlikeError
    in_steps = MovedPeers(
        source=source.steps,
        rank=rank,
        peers={peer: moved_peer(plan, peer, source.steps, rank) for peer in range(size)},
    )
    in_decode = MovedPeers(
        source=source.decode,
        rank=rank,
        peers={peer: (peer + rank - source.decode) % size for peer in range(size)},
        to_root=_to_root(back) if source.decode > 1 else frozenset(),
    )
    return *_moved(front, plan, in_steps), *_moved(back, plan, in_decode)


def are_of_one_branch(plan: Plan, rank: int, source: SourcesOfRank) -> bool:
    """Whether a rank and the one whose steps it has compute the same guidance branch."""
    return mesh_of_image(plan, rank)["cfg"].rank == mesh_of_image(plan, source.steps)["cfg"].rank


def _divided(events: Sequence[Entry]) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Return events until the last step's end, and what follows."""
    ends = [at for at, event in enumerate(events) if isinstance(event, Noted) and event.name == "step_ended"]
    at = ends[-1] if ends else len(events)
    return events[:at], events[at:]


def _bytes_of(events: Iterable[Any]) -> int:
    """Return the bytes that are left of what events have allocated."""
    return sum(
        event if isinstance(event, int) else event.num_bytes if isinstance(event, EventRun) else _bytes_of(event.events)
        for event in events
        if isinstance(event, (int, EventRun, LoggedAttention))
    )


def _is_pending(events: Sequence[Entry]) -> bool:
    """Whether events are of messages that were announced before."""
    noted = [event for event in events if isinstance(event, Noted)]
    known = {event.result for event in noted if event.result is not None}
    return any(isinstance(each, (Expected, Begun)) and each not in known for event in noted for each in event.args)


def _to_root(events: Sequence[Entry]) -> frozenset[str]:
    """Return the exchange points at which a rank sends to the first rank only."""
    sends = [event for event in events if isinstance(event, Noted) and event.name == "send"]
    others = {event.args[3] for event in sends if event.args[0]}
    return frozenset(event.args[3] for event in sends) - others


def _moved(events: Sequence[Entry], plan: Plan, moving: MovedPeers) -> Iterator[Entry]:
    for key, run in groupby(events, _exchange_of):
        if key is not None:
            yield from in_order([event for event in run if isinstance(event, Noted)], moving)
            continue
        for event in run:
            yield _attention(event, plan, moving) if isinstance(event, LoggedAttention) else event


def _exchange_of(event: Entry) -> tuple[str, str] | None:
    """Return what the events of one exchange have in common that are noted once for each rank; None for others."""
    if not isinstance(event, Noted) or event.name not in OF_PEERS:
        return None
    return event.name, event.args[0].where if event.name == "wait" else event.args[3]


def peer_of(event: Noted) -> int:
    """Return the other rank of an event of OF_PEERS."""
    peer = event.args[0]
    return peer.sender if isinstance(peer, Expected) else int(peer)


def in_order(run: Sequence[Noted], moving: MovedPeers) -> Iterator[Noted]:
    """Yield the events of one exchange for the moved peers, in their order. Raises NotAlikeError."""
    before, after = [*map(peer_of, run)], [*map(moving.of, run)]
    nearest = sorted(before, key=lambda peer: (abs(peer - moving.source), peer))
    orders = set[tuple[int, ...]]()
    if before == nearest:
        orders.add(tuple(sorted(range(len(run)), key=lambda at: (abs(after[at] - moving.rank), after[at]))))
    if before == sorted(before):
        orders.add(tuple(sorted(range(len(run)), key=lambda at: after[at])))
    if len(orders) != 1 or len(set(before)) < len(before):
        raise NotAlikeError
    for at in orders.pop():
        event = run[at]
        yield event if event.name == "wait" else replace(event, args=(after[at], *event.args[1:]))


def _attention(event: LoggedAttention, plan: Plan, moving: MovedPeers) -> LoggedAttention:
    """Return exact attention of the moved rank, without its events. Raises NotAlikeError."""
    return replace(event, form=_form(event.form, plan, moving), events=())


def _form(form: AttentionForm | None, plan: Plan, moving: MovedPeers) -> AttentionForm:
    before, after = (mesh_of_image(plan, rank)["patch"] for rank in (moving.source, moving.rank))
    if form is None or form.axis != before or form.group_rank != before.rank:
        raise NotAlikeError
    if form.sizes[before.rank] != form.sizes[after.rank]:
        raise NotAlikeError
    return replace(form, axis=after, group_rank=after.rank)
