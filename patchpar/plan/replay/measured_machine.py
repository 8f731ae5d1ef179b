"""This machine as `patchpar tune` has measured it: devices by kind, and the links between each two of them by class."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from statistics import median

from patchpar.errors import PlanError
from patchpar.plan.replay.measured_device import MeasuredDevice
from patchpar.plan.replay.topology import Resource, Route, Topology

LARGE_MESSAGE = 16 * 2**20
"""Bytes of the message that gives the rate of a link."""
ALIKE = 1.25
"""Rates and latencies of pairs of devices that are of one class differ by at most this factor."""
APART = 0.9
"""Of what all pairs of a class would send with ports of their own; below, they share a resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """A pair of devices: seconds of the smallest message, and bytes per second of a large one, in one direction."""

    pair: tuple[int, int]
    latency: float
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """Pairs of devices whose links are alike. `shared`: bytes per second of all messages at once; inf: not limited."""

    pairs: tuple[tuple[int, int], ...]
    latency: float
    rate: float
    shared: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """`devices` of one host, all like `device`. `links`: every pair is in one class.

    `mixed`: the devices in order, where they are of several kinds; `device` is the first of them. `host`: bytes per
    second of a copy from the host's memory while all devices copy; 0: not measured.
    """

    device: MeasuredDevice
    devices: int
    links: tuple[LinkClass, ...]
    mixed: tuple[MeasuredDevice, ...] = ()
    host: float = 0.0

    def device_at(self, number: int) -> MeasuredDevice:
        """Return the device of that number."""
        return self.mixed[number] if self.mixed else self.device

    @property
    def is_mixed(self) -> bool:
        """Whether its devices are of several kinds."""
        return bool(self.mixed)

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are alike, and so are links between any two."""
        return len(self.links) <= 1 and not self.mixed

    def scaled(self, factor: float) -> "MeasuredMachine":
        """Return the machine whose kernels take so many times the seconds."""
        of = {each.name: replace(each, scale=each.scale * factor) for each in (self.device, *self.mixed)}
        return replace(self, device=of[self.device.name], mixed=tuple(of[each.name] for each in self.mixed))

    def topology(self) -> Topology:
        """Return the routes between its devices. A route raises PlanError for a device that no link reaches."""
        by_pair = {pair: (number, each) for number, each in enumerate(self.links) for pair in each.pairs}

        def route(a: int, b: int) -> Route:
            if a == b:
                return self._from_host(a)
            if (min(a, b), max(a, b)) not in by_pair:
                raise PlanError(f"no link between devices {a} and {b} was measured: run patchpar tune with all of them")
            number, link = by_pair[min(a, b), max(a, b)]
            common = [Resource(f"links of class {number}", link.shared)] if math.isfinite(link.shared) else []
            return Route((Resource(f"out {a}", link.rate), *common, Resource(f"in {b}", link.rate)), link.latency)

        return Topology(cache(route))

    def _from_host(self, rank: int) -> Route:
        if not self.host:
            raise PlanError("copies from host memory, of weights=hosted, were not measured: run patchpar tune")
        return Route((Resource(f"from host {rank}", self.host),))

    def assumptions(self) -> Iterator[str]:
        """Yield what was measured of its links."""
        if self.host:
            yield f"copies from host memory: measured, {self.host / 1e9:.3g} GB/s to each device"
        for link in self.links:
            shared = f", all at once {link.shared / 1e9:.3g} GB/s" if math.isfinite(link.shared) else ""
            pairs = ", ".join(f"{a}-{b}" for a, b in link.pairs[:4]) + (", ..." if len(link.pairs) > 4 else "")
            yield f"links {pairs}: measured, {link.rate / 1e9:.3g} GB/s and {1e6 * link.latency:.0f} µs{shared}"

    def __str__(self) -> str:
        kinds = groupby(self.device_at(number).name for number in range(self.devices))
        return f"{'+'.join(f'{len(list(alike))}x{name}' for name, alike in kinds)}, measured"


def classes_of(links: Sequence[MeasuredLink]) -> list[LinkClass]:
    """Return classes of alike pairs, the fastest first; each has the medians of its pairs."""
    classes: list[list[MeasuredLink]] = []
    for link in sorted(links, key=lambda each: -each.rate):
        alike = [found for found in classes if _alike(found[0], link)]
        if alike:
            alike[0].append(link)
        else:
            classes.append([link])
    return [
        LinkClass(
            pairs=tuple(sorted(each.pair for each in found)),
            latency=median(each.latency for each in found),
            rate=median(each.rate for each in found),
        )
        for found in classes
    ]


def _alike(a: MeasuredLink, b: MeasuredLink) -> bool:
    return _ratio(a.rate, b.rate) <= ALIKE and _ratio(a.latency, b.latency) <= ALIKE**2


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b)


def shared_rate(link: LinkClass, sent: Mapping[tuple[int, int], float]) -> float:
    """Return the bytes per second of all pairs of a class at once; inf where each sends as fast as alone.

    `sent`: bytes per second in both directions of each pair while all pairs send.
    """
    busy = {rank for pair in sent for rank in pair}
    total, alone = sum(sent.values()), len(busy) * link.rate
    return math.inf if total >= APART * alone else total
