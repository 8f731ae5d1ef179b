"""The tapes of all ranks of an image: some recorded, the others like those at a place of the same kind.

Along axis `patch` the first and the last rank differ from those between, which are alike where their shares are equal:
the tape of one is that of the other with its peers moved along the axis. That is checked: between any two ranks what
one sends is what the other waits for, in order and to the byte. Ranks for which it is not so are recorded too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from patchpar.errors import PlanError
from patchpar.pipeline.planner.record import RecordedRank
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.replay.tape import Send, Tape, TapeEntry, Wait

RECORDED = 3
"""Ranks along axis `patch` up to which all are recorded; of more, the first, one between, and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRanks:
    """The ranks of one image: the tape of each, and the recorded rank whose tape it is."""

    tapes: tuple[Tape, ...]
    recorded: tuple[RecordedRank, ...]


def ranks_of_image(plan: Plan, record: Callable[[int], RecordedRank]) -> ImageRanks:
    """Return the ranks of the first image of a plan. Raises what `record` raises, PlanError if ranks do not match."""
    size = plan.world_size // plan.data
    found: dict[int, RecordedRank] = {}
    kept: set[int] = set()  # that have to be recorded themselves
    while True:
        source = {rank: rank if rank in kept else _like(plan, rank) for rank in range(size)}
        for rank in dict.fromkeys(source.values()):
            if rank not in found:
                found[rank] = record(rank)
        tapes = [_moved(plan, found[source[rank]].tape, source[rank], rank) for rank in range(size)]
        odd = {rank for pair in unequal_pairs(tapes) for rank in pair}
        if not odd:
            return ImageRanks(tapes=tuple(tapes), recorded=tuple(found[source[rank]] for rank in range(size)))
        more = {rank for rank in odd if source[rank] != rank}
        if not more:
            raise PlanError(f"ranks {sorted(odd)} of plan {plan} do not send what others wait for: this is a bug")
        kept |= more


def _mesh(plan: Plan, rank: int) -> Mesh:
    return Mesh(rank, range(plan.world_size), **plan.degrees())


def _like(plan: Plan, rank: int) -> int:
    """Return the rank whose tape is recorded for this one."""
    patch = _mesh(plan, rank)["patch"]
    if patch.size <= RECORDED or patch.rank in (0, patch.size - 1):
        return rank
    return patch.ranks[patch.size // 2]


def _moved(plan: Plan, tape: Tape, source: int, rank: int) -> Tape:
    """Return the tape of `source` for `rank`, of another patch: its peers move along that axis as it does."""
    if source == rank:
        return tape
    by = _mesh(plan, rank)["patch"].rank - _mesh(plan, source)["patch"].rank
    axes = [_mesh(plan, peer)["patch"] for peer in range(plan.world_size)]
    moved = {peer: axis.ranks[(axis.rank + by) % axis.size] for peer, axis in enumerate(axes)}
    return tuple(_renumbered(entry, moved) for entry in tape)


def _renumbered(entry: TapeEntry, peers: Mapping[int, int]) -> TapeEntry:
    if isinstance(entry, Send):
        return replace(entry, peers=tuple(peers[peer] for peer in entry.peers))
    return replace(entry, sender=peers[entry.sender]) if isinstance(entry, Wait) else entry


def unequal_pairs(tapes: Sequence[Tape]) -> list[tuple[int, int]]:
    """Return pairs (sender, receiver) of which one does not send what the other waits for, by number and bytes."""
    sent, awaited = dict[tuple[int, int], dict[int, int]](), dict[tuple[int, int], dict[int, int]]()
    for rank, tape in enumerate(tapes):
        for pair, number, num_bytes, is_sent in _messages(rank, tape):
            (sent if is_sent else awaited).setdefault(pair, {})[number] = num_bytes
    return [pair for pair in {*sent, *awaited} if not _is_covered(awaited.get(pair, {}), sent.get(pair, {}))]


def _messages(rank: int, tape: Tape) -> Iterator[tuple[tuple[int, int], int, int, bool]]:
    for entry in tape:
        if isinstance(entry, Send):
            for peer in entry.peers:
                yield (rank, peer), entry.number, entry.num_bytes, True
        elif isinstance(entry, Wait):
            yield (entry.sender, rank), entry.number, entry.num_bytes, False


def _is_covered(awaited: Mapping[int, int], sent: Mapping[int, int]) -> bool:
    """Whether all that is waited for is sent, and of what is sent something is waited for.

    Not all: nobody waits for the values that a stale strategy sends in the last step.
    """
    if sent and not awaited:
        return False
    return all(sent.get(number) == num_bytes for number, num_bytes in awaited.items())
