"""Which ranks hand tensors over from device to device: agreed on through the host's memory, before they begin.

Each rank says whether it needs new groups, as one that has been started anew does, and on which card it is. If one
does, all make new ones, and meet at a file without a name that the first rank has.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import LinkTransport
from patchpar.errors import ExchangeError
from patchpar.plan.mesh import Axis

WHERE = "device links"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinks:
    """`pairs`: sender and receiver of tensors. `sets`: ranks that exchange all at once, ascending. Global ranks."""

    pairs: tuple[tuple[int, int], ...] = ()
    sets: tuple[tuple[int, ...], ...] = ()

    def between(self, cards: Mapping[int, str]) -> "DeviceLinks":
        """Return those of ranks with a card each. `cards`: by rank; empty for a rank without."""

        def differ(ranks: tuple[int, ...]) -> bool:
            found = {cards[rank] for rank in ranks}
            return len(found) == len(ranks) and "" not in found

        return DeviceLinks(
            pairs=tuple(sorted(pair for pair in set(self.pairs) if differ(pair))),
            sets=tuple(ranks for ranks in self.sets if differ(ranks)),
        )


def form_links(comm: Communicator, ranks: Sequence[int], links: DeviceLinks) -> None:
    """Make the groups of `links`, where this rank can have some, unless all ranks still have theirs.

    Collective of `ranks`, global and ascending. Raises ExchangeError.
    """
    transport = comm.transport
    if not isinstance(transport, LinkTransport) or len(ranks) == 1:
        return
    axis = Axis("stages", list(ranks).index(transport.rank), len(ranks), tuple(ranks))
    gather = AllGather(comm.host, axis, "links", WHERE)
    files = transport.files
    own = [not transport.has_formed, transport.card, transport.generation, "" if axis.rank else files.own]
    facts = [json.loads(each) for each in gather.of_bytes(json.dumps(own).encode())]
    if not any(needs for needs, *_ in facts):
        return
    found = links.between({rank: card for rank, (_, card, *_) in zip(ranks, facts, strict=True)})
    left = sorted(set(links.pairs).difference(found.pairs))
    if left and axis.rank == 0:
        log.warning("ranks %s share a GPU: their tensors go through the host's memory", ", ".join(map(str, left)))
    transport.generation = 1 + max(generation for *_, generation, _ in facts)
    transport.renew(
        _rendezvous(transport, facts[0][-1]) if found.pairs or found.sets else None, found.pairs, found.sets
    )


def drop_links(comm: Communicator, reason: str) -> None:
    """End what is in flight between devices, so that none waits for it: the next `form_links` makes new groups."""
    if isinstance(comm.transport, LinkTransport):
        comm.transport.poison(reason)


def _rendezvous(transport: LinkTransport, path: str) -> Any:
    """Return the store of this generation of groups in the first rank's file. Raises ExchangeError."""
    try:
        return transport.files.store(path, transport.generation, transport.deadline)
    except OSError as error:
        raise ExchangeError(f"rank {transport.rank} cannot open {path}, where the ranks meet: {error}") from error
