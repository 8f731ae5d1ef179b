"""The replay of many groups of ranks that run the same programs: groups on equal links are replayed once.

Ranks of different groups send each other nothing, as those of axis `data`. Groups that pass the same resource, such as
the network card of a host, are replayed together. So a replay of 1,000 devices takes as long as that of one group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.plan.replay.replay import Replayed, replay
from patchpar.plan.replay.tape import Receive, Send, Tape, TapeEntry, Wait
from patchpar.plan.replay.topology import Route, Topology


@dataclass(frozen=True, slots=True)
class FoldedReplay:
    """Replays of different sets of groups, with how many such sets there are. Ranks in them are numbered from 0."""

    found: tuple[tuple[int, Replayed], ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last rank has ended."""
        return max((each.seconds for _, each in self.found), default=0.0)

    @property
    def slowest(self) -> Replayed:
        """The replay that ends last."""
        return max((each for _, each in self.found), key=lambda each: each.seconds)


def replay_groups(
    tapes: Sequence[Tape], groups: int, topology: Topology, pairs: Sequence[tuple[int, int]] | None = None
) -> FoldedReplay:
    """Replay `groups` times the ranks of `tapes`: rank i of group g is rank g * len(tapes) + i of the topology.

    `pairs`: of `pairs_of(tapes)`, if they are known.
    Raises PlanError where a rank sends to one of another group, Deadlock.
    """
    size, pairs = len(tapes), pairs_of(tapes) if pairs is None else pairs
    by_form: dict[object, list[tuple[int, ...]]] = {}
    for together in _sharing(groups, size, pairs, topology):
        by_form.setdefault(_form(together, size, pairs, topology), []).append(together)
    return FoldedReplay(
        tuple((len(alike), _replayed(tapes, alike[0], topology)) for alike in by_form.values()),
    )


def pairs_of(tapes: Sequence[Tape]) -> list[tuple[int, int]]:
    """Return the pairs (sender, receiver) of a group. Raises PlanError where a rank sends to one of another group."""
    return sorted({pair for rank, tape in enumerate(tapes) for pair in _pairs(rank, tape, len(tapes))})


def links_of(groups: int, size: int, pairs: Sequence[tuple[int, int]], topology: Topology) -> object:
    """Return what topologies have in common on which `groups` groups of `size` ranks take the same time. Hashable."""
    return _form(range(groups), size, pairs, topology)


def _pairs(rank: int, tape: Tape, size: int) -> Iterator[tuple[int, int]]:
    for entry in tape:
        if isinstance(entry, Send):
            for peer in entry.peers:
                if not 0 <= peer < size:
                    raise PlanError(f"rank {rank} of a group of {size} sends to rank {peer}: use 0 to {size - 1}")
                yield rank, peer


def _routes(
    together: Sequence[int], size: int, pairs: Sequence[tuple[int, int]], topology: Topology
) -> Iterator[Route]:
    for group in together:
        for sender, receiver in pairs:
            yield topology.path(group * size + sender, group * size + receiver)


def _sharing(groups: int, size: int, pairs: Sequence[tuple[int, int]], topology: Topology) -> list[tuple[int, ...]]:
    """Return the groups in sets that share a resource, also by way of a third group."""
    first: dict[str, int] = {}
    parent = list(range(groups))

    def root(group: int) -> int:
        while parent[group] != group:
            parent[group] = group = parent[parent[group]]
        return group

    for group in range(groups):
        for route in _routes([group], size, pairs, topology):
            for resource in route.resources:
                parent[root(group)] = root(first.setdefault(resource.name, group))
    sets: dict[int, list[int]] = {}
    for group in range(groups):
        sets.setdefault(root(group), []).append(group)
    return [tuple(each) for each in sets.values()]


def _form(together: Sequence[int], size: int, pairs: Sequence[tuple[int, int]], topology: Topology) -> object:
    """Return what two sets of groups have in common that take the same time: their routes, whatever the names."""
    numbers: dict[str, int] = {}
    return tuple(
        (tuple((numbers.setdefault(each.name, len(numbers)), each.rate) for each in route.resources), route.latency)
        for route in _routes(together, size, pairs, topology)
    )


def _replayed(tapes: Sequence[Tape], together: Sequence[int], topology: Topology) -> Replayed:
    size = len(tapes)
    shifted = [moved(tape, number * size) for number in range(len(together)) for tape in tapes]

    def path(a: int, b: int) -> Route:
        return topology.path(*(together[rank // size] * size + rank % size for rank in (a, b)))

    return replay(shifted, Topology(path))


def moved(tape: Tape, by: int) -> Tape:
    """Return the same program of a rank whose peers have numbers that are larger by so many."""
    return tuple(_shifted(entry, by) for entry in tape) if by else tape


def _shifted(entry: TapeEntry, by: int) -> TapeEntry:
    if isinstance(entry, Send):
        return entry.to(*(peer + by for peer in entry.peers))
    return entry.of(entry.sender + by) if isinstance(entry, (Receive, Wait)) else entry
