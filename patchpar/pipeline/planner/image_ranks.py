"""The programs of all ranks of an image: some recorded, the others like those at a place of the same kind.

Until the last step ranks differ by their place on axis `patch`: the first and the last differ from those between, and
all guidance branches are alike. While decoding, bands are those of all ranks of the image, and so are first, last and
between. The program of one rank is that of another with its peers moved along the axes. That is checked: between any
two ranks what one sends is what the other waits for, in order and to the byte. Ranks for which it is not so are
recorded too.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from patchpar.errors import PlanError
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.tape_recorder import DECODE, DECODE_NUMBERS
from patchpar.plan.mesh import Axis, Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.replay.tape import Boundary, Leave, Receive, Send, Tape, TapeEntry, Wait

RECORDED = 3
"""Ranks along an axis up to which all are recorded; of more, the first, one between, and the last."""
Peers = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SourcesOfRank:
    """The recorded ranks whose programs a rank has: until the last step, and while decoding."""

    steps: int
    decode: int


@dataclass(frozen=True, kw_only=True)
class ImageRanks:
    """The ranks of one image under a plan: those that were recorded, by rank, and for each rank its sources."""

    plan: Plan
    recorded: Mapping[int, RecordedRank]
    sources: tuple[SourcesOfRank, ...]

    @cached_property
    def ranks(self) -> tuple[RecordedRank, ...]:
        """The ranks in order."""
        tapes = PlacedTapes(self, lambda tape: tape)
        return tuple(replace(each, tape=tapes.of(rank)) for rank, each in enumerate(self.without_tapes))

    @cached_property
    def without_tapes(self) -> tuple[RecordedRank, ...]:
        """The ranks in order, but for their tapes, which are empty."""
        return tuple(self._without_tape(rank, source) for rank, source in enumerate(self.sources))

    def _without_tape(self, rank: int, source: SourcesOfRank) -> RecordedRank:
        """Return a rank with the memory of one recorded rank, while decoding that of another."""
        steps, decode = self.recorded[source.steps], self.recorded[source.decode]
        peaks, working = _in_phases(steps.peaks, decode.peaks), _in_phases(steps.working, decode.working)
        return replace(steps, rank=rank, tape=(), peaks=peaks, working=working)

    @property
    def tapes(self) -> tuple[Tape, ...]:
        """The tape of each rank."""
        return tuple(rank.tape for rank in self.ranks)

    @cached_property
    def messages(self) -> tuple[Tape, ...]:
        """What each rank sends and waits for, without the other entries of its tape."""
        tapes = PlacedTapes(self, _messages)
        return tuple(map(tapes.of, range(len(self.sources))))


class PlacedTapes:
    """The tapes of the ranks of an image, each made of those of its sources.

    `change` makes other tapes of recorded ones, or of parts of them, with the same messages or fewer: what several
    ranks have is changed once.
    """

    def __init__(self, ranks: ImageRanks, change: Callable[[Tape], Tape]) -> None:
        self._ranks, self._change = ranks, change
        self._whole = cache(lambda rank: change(ranks.recorded[rank].tape))
        self._parts = cache(self._changed_parts)

    def of(self, rank: int) -> Tape:
        """Return the tape of a rank: the steps of one recorded rank and the decoding of another."""
        plan, source = self._ranks.plan, self._ranks.sources[rank]
        if source == SourcesOfRank(rank, rank):
            return self._whole(rank)
        size = len(self._ranks.sources)
        in_steps = {peer: moved_peer(plan, peer, source.steps, rank) for peer in range(size)}
        in_decode = {peer: (peer + rank - source.decode) % size for peer in range(size)}
        steps, decode = self._parts(source.steps), self._parts(source.decode)
        to_root = decode.to_root if source.decode > 1 else frozenset()  # of rank 1 it may be a neighbour
        found, sent = list[TapeEntry](), Counter[int]()
        _add_part(steps.front, in_steps, frozenset(), sent, found)
        _add_part(decode.decoding, in_decode, to_root, sent, found)
        _add_part(steps.pending, in_steps, frozenset(), sent, found)
        return tuple(found)

    def _changed_parts(self, rank: int) -> "_Parts":
        front, back = _divided(self._ranks.recorded[rank].tape)
        decoding = tuple(entry for entry in back if not _is_pending(entry))
        return _Parts(
            front=self._change(front),
            decoding=self._change(decoding),
            pending=self._change(tuple(filter(_is_pending, back))),
            to_root=_to_root(decoding),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A tape until the last step's end, what follows, and waits in that for what was sent in the steps.

    `to_root`: see `_to_root`, of what follows.
    """

    front: Tape
    decoding: Tape
    pending: Tape
    to_root: frozenset[str]


def ranks_of_image(plan: Plan, record: Callable[[int], RecordedRank]) -> ImageRanks:
    """Return the ranks of the first image of a plan. Raises what `record` raises, PlanError if ranks do not match."""
    size = plan.world_size // plan.data
    found = {0: record(0)}  # first, as it refuses plans that cannot be, before all ranks are looked at
    differ = plan.ratio or plan.stage * plan.tensor > 1
    kept = set(range(size if differ else 0))  # that have to be recorded themselves
    while True:
        sources = [SourcesOfRank(rank, rank) if rank in kept else _sources(plan, rank) for rank in range(size)]
        for rank in dict.fromkeys(each for source in sources for each in (source.steps, source.decode)):
            if rank not in found:
                found[rank] = record(rank)
        ranks = ranks_from(plan, found, sources)
        odd = {rank for pair in unequal_pairs(ranks.messages) for rank in pair}
        if not odd:
            return ranks
        more = odd - kept - {rank for rank in odd if sources[rank] == SourcesOfRank(rank, rank)}
        if not more:
            raise PlanError(f"ranks {sorted(odd)} of plan {plan} do not send what others wait for: this is a bug")
        kept |= more


def ranks_from(plan: Plan, recorded: Mapping[int, RecordedRank], sources: Sequence[SourcesOfRank]) -> ImageRanks:
    """Return the ranks of an image. `sources`: for each rank those that were recorded for it."""
    return ImageRanks(plan=plan, recorded=recorded, sources=tuple(sources))


def _sources(plan: Plan, rank: int) -> SourcesOfRank:
    """Return the ranks that are recorded for this one.

    With three of one image, of all guidance branches: its first rank, its last one, and one between.
    """
    patch, size = mesh_of_image(plan, rank)["patch"], plan.world_size // plan.data
    between = mesh_of_image(plan, 0)["patch"].ranks[patch.size // 2]
    if patch.size > RECORDED and patch.rank not in (0, patch.size - 1):
        steps = mesh_of_image(plan, 0)["patch"].ranks[_between(plan, patch)]
    elif patch.rank == 0 and patch.size > 1:
        steps = 0
    elif patch.rank == patch.size - 1 and patch.size > 1:
        steps = size - 1
    else:
        steps = mesh_of_image(plan, 0)["patch"].ranks[patch.rank]
    if size <= RECORDED or rank in (0, size - 1):
        return SourcesOfRank(steps, rank)
    return SourcesOfRank(steps, between if patch.size > RECORDED else size // 2)


def _between(plan: Plan, patch: Axis) -> int:
    """Return the index along axis `patch` of the rank between first and last that is recorded for another one.

    Where groups of ranks exchange tokens for heads, one at the same place in its group, if there is one.
    """
    group, middle = getattr(plan.strategy, "ulysses", 1), patch.size // 2
    found = middle // group * group + patch.rank % group if group < patch.size else middle
    return found if 0 < found < patch.size - 1 else patch.rank


def mesh_of_image(plan: Plan, rank: int) -> Mesh:
    """Return the mesh of a rank of the first image, without those of other images: there may be a thousand."""
    return Mesh(rank, range(plan.world_size // plan.data), **{**plan.degrees(), "data": 1})


def _is_pending(entry: TapeEntry) -> bool:
    """Whether a rank waits, while decoding, for what was sent in the steps."""
    if isinstance(entry, Leave):
        return entry.operation < DECODE_NUMBERS
    return isinstance(entry, Wait) and entry.number < DECODE_NUMBERS


def _in_phases(steps: Mapping[str, int], decode: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each phase: those of one rank, while decoding those of another."""
    return {**steps, **({DECODE: decode[DECODE]} if DECODE in decode else {})}


def _add_part(part: Tape, peers: Peers, to_root: frozenset[str], sent: Counter[int], found: list[TapeEntry]) -> None:
    """Add a part to the tape of a rank with these peers. `to_root`: exchange points whose messages stay as they are.

    What is sent while decoding is counted again, in `sent`: messages to a neighbour and to the first rank.
    """
    for entry in part:
        kind = type(entry)
        if kind is Send:
            assert isinstance(entry, Send)
            moved = entry if entry.where in to_root else entry.to(*[peers[peer] for peer in entry.peers])
            if moved.number >= DECODE_NUMBERS:
                (peer,) = moved.peers
                moved = moved.to(peer, number=DECODE_NUMBERS + sent[peer])
                sent[peer] += 1
            found.append(moved)
        elif kind is Receive or kind is Wait:
            assert isinstance(entry, (Receive, Wait))
            found.append(entry.of(peers[entry.sender]))
        else:
            found.append(entry)


def _divided(tape: Tape) -> tuple[Tape, Tape]:
    """Return a tape until the last step's end, and what follows."""
    last = Boundary(DECODE, is_step=True)
    ends = (at for at, entry in enumerate(tape) if isinstance(entry, Boundary) and entry == last)
    at = next(ends, len(tape))
    return tape[:at], tape[at:]


def moved_peer(plan: Plan, peer: int, source: int, rank: int) -> int:
    """Return the peer that is to `rank` what `peer` is to `source`, along axes cfg and patch."""
    mesh, before, after = mesh_of_image(plan, peer), mesh_of_image(plan, source), mesh_of_image(plan, rank)
    patch = mesh["patch"]
    found = patch.ranks[(patch.rank + after["patch"].rank - before["patch"].rank) % patch.size]
    cfg = mesh_of_image(plan, found)["cfg"]
    return cfg.ranks[(cfg.rank + after["cfg"].rank - before["cfg"].rank) % cfg.size]


def _to_root(tape: Sequence[TapeEntry]) -> frozenset[str]:
    """Return the exchange points at which a rank sends to the first rank only, as of decoded bands."""
    peers: dict[str, set[int]] = {}
    for entry in tape:
        if isinstance(entry, Send):
            peers.setdefault(entry.where, set()).update(entry.peers)
    return frozenset(where for where, found in peers.items() if found == {0})


def _messages(tape: Tape) -> Tape:
    return tuple([entry for entry in tape if type(entry) is Send or type(entry) is Wait])


def unequal_pairs(tapes: Sequence[Tape]) -> list[tuple[int, int]]:
    """Return pairs (sender, receiver) of which one does not send what the other waits for, by number and bytes."""
    sent, awaited = dict[tuple[int, int], dict[int, int]](), dict[tuple[int, int], dict[int, int]]()
    for rank, tape in enumerate(tapes):
        for entry in tape:
            if isinstance(entry, Send):
                for peer in entry.peers:
                    sent.setdefault((rank, peer), {})[entry.number] = entry.num_bytes
            elif isinstance(entry, Wait):
                awaited.setdefault((entry.sender, rank), {})[entry.number] = entry.num_bytes
    return [pair for pair in {*sent, *awaited} if not _is_covered(awaited.get(pair, {}), sent.get(pair, {}))]


def _is_covered(awaited: Mapping[int, int], sent: Mapping[int, int]) -> bool:
    """Whether all that is waited for is sent, and of what is sent something is waited for.

    Not all: nobody waits for the values that a stale strategy sends in the last step.
    """
    if sent and not awaited:
        return False
    return all(sent.get(number) == num_bytes for number, num_bytes in awaited.items())
