"""Machines by name: devices of the catalogue, the links between them, and networks between hosts.

8xH100-nvlink               one host
4xRTX4090-pcie4             cards without peer access: messages pass the host's memory, which four cards share
2x(4xL40-pcie4)-eth100      two hosts of four, 100 Gbit/s of Ethernet to each; ib400 is InfiniBand
1xRTX5090+2xRTX4090-pcie4   devices of several kinds in one host, in this order
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from patchpar.errors import PlanError
from patchpar.plan.replay.device_catalogue import GB, DeviceSpec
from patchpar.plan.replay.machine_names import device_named, nearest_machine
from patchpar.plan.replay.topology import Resource, Route, Topology

NVLINK, PCIE = "nvlink", "pcie"
NETWORKS = {"eth": 80e-6, "ib": 30e-6}
"""Latency of a message between hosts, in seconds, by the name of the network: TCP, and RDMA."""
PUBLISHED_OFF = (-0.25, 0.12)
"""The least and the largest relative error of predictions for one device, in docs/figures/forecast."""
PUBLISHED_OFF_OF_SEVERAL = (-0.48, 0.67)
"""The same for several devices, of calls that do not wait for Python."""
LINE_FRACTION = 0.9
NVLINK_FRACTION, NVLINK_LATENCY = 0.7, 20e-6
PCIE_RATES = {3: 11 * GB, 4: 22 * GB, 5: 45 * GB}
"""Bytes per second of a x16 port in one direction, as copies between two cards reach it, by generation."""
HOST_RATES = {3: 12.5 * GB, 4: 25 * GB, 5: 54 * GB}
"""The same from the host's pinned memory to a card: 54.4 were measured on an H200 (docs/figures/gpu.md), of generation
5; the others have the same part of their line rate, rounded."""
PCIE_LATENCY = 30e-6
CARDS_OF_A_ROOT = 4
MOST_DEVICES = 100_000
FORM = "8xH100-nvlink, 4xRTX4090-pcie4, 1xRTX5090+2xRTX4090-pcie4 or 2x(4xL40-pcie4)-eth100"
_HOST = re.compile(r"(?:(\d{1,9})x)?([a-z][a-z0-9 ]*)(?:-(nvlink|pcie\d|[a-z0-9]+))?", re.IGNORECASE)
_CLUSTER = re.compile(r"(\d{1,9})x\((.*)\)-([a-z]+)(\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`hosts` hosts with `devices_per_host` devices. `link`: nvlink or pcie with its generation, within a host.

    `network`: eth or ib with its Gbit/s per host; empty for one host. Ranks are numbered host by host. `mixed`: the
    devices of a host in order, where they are of several kinds; `device` is the first of them.
    """

    device: DeviceSpec
    devices_per_host: int
    link: str
    hosts: int = 1
    network: str = ""
    mixed: tuple[DeviceSpec, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Machine":
        """Read a machine's name. Raises PlanError that names the nearest known one."""
        cluster = _CLUSTER.fullmatch(text.strip())
        if cluster is None:
            return cls._host(text.strip(), text)
        hosts, inside, network, gbits = cluster.groups()
        if network.lower() not in NETWORKS:
            raise PlanError(f"machine {text!r}: no network {network!r}: use {' or '.join(NETWORKS)}, as in eth100")
        if not int(hosts) or not int(gbits):
            raise PlanError(f"machine {text!r}: hosts and Gbit/s are numbers of at least 1, as in {FORM}")
        host = cls._host(inside, text)
        _check_count(int(hosts) * host.devices_per_host, text)
        return cls(
            device=host.device,
            devices_per_host=host.devices_per_host,
            link=host.link,
            hosts=int(hosts),
            network=f"{network.lower()}{int(gbits)}",
            mixed=host.mixed,
        )

    @classmethod
    def _host(cls, text: str, whole: str) -> "Machine":
        *others, last = text.split("+")
        found = [_HOST.fullmatch(part.strip()) for part in (*others, last)]
        parts = [each.groups() for each in found if each is not None]
        if len(parts) < len(found) or any(link for *_, link in parts[:-1]):
            near = nearest_machine(whole)
            nearest = f", the nearest is {near}" if near else ""
            raise PlanError(f"machine {whole!r} cannot be read{nearest}: use the form {FORM}")
        if any(count is not None and not int(count) for count, *_ in parts):
            raise PlanError(f"machine {whole!r} has no device: use a number of at least 1, as in {FORM}")
        _check_count(sum(int(count or 1) for count, *_ in parts), whole)
        devices = [device for count, name, _ in parts for device in [device_named(name)] * int(count or 1)]
        link = _link_of(devices, parts[-1][-1], whole)
        is_mixed = any(each != devices[0] for each in devices)
        return cls(device=devices[0], devices_per_host=len(devices), link=link, mixed=tuple(devices) * is_mixed)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.hosts * self.devices_per_host

    def device_at(self, number: int) -> DeviceSpec:
        """Return the device of that number."""
        return self.mixed[number % self.devices_per_host] if self.mixed else self.device

    @property
    def is_mixed(self) -> bool:
        """Whether its devices are of several kinds."""
        return bool(self.mixed)

    @property
    def is_uniform(self) -> bool:
        """Whether links between any two devices are alike, and share as much."""
        one_root = self.link == NVLINK or self.device.peers or self.devices_per_host <= CARDS_OF_A_ROOT
        return self.hosts == 1 and one_root and not self.mixed

    def topology(self) -> Topology:
        """Return the routes between its devices."""
        return Topology(cache(self._route))

    def _route(self, a: int, b: int) -> Route:
        if a == b:
            return Route((Resource(self._host_port(a), self.host_rate(a)),), PCIE_LATENCY)
        hosts = a // self.devices_per_host, b // self.devices_per_host
        if hosts[0] == hosts[1]:
            return Route(tuple(self._within(a, b)), NVLINK_LATENCY if self.link == NVLINK else PCIE_LATENCY)
        name = self.network.rstrip("0123456789")
        rate = LINE_FRACTION * int(self.network.removeprefix(name)) * GB / 8
        resources = [self._port("out", a, a), *(Resource(f"{way} of host {host}", rate) for way, host in _cards(hosts))]
        return Route((*resources, self._port("in", b, b)), NETWORKS[name])

    def _within(self, a: int, b: int) -> Iterator[Resource]:
        yield self._port("out", a, b)
        if self._is_through_host(a, b):
            host = a // self.devices_per_host
            for root in dict.fromkeys(each % self.devices_per_host // CARDS_OF_A_ROOT for each in (a, b)):
                yield Resource(f"memory of host {host} at root {root}", 2 * self._rate(a, b))
        yield self._port("in", b, a)

    def _host_port(self, rank: int) -> str:
        """Return the port through which copies from the host come: that of messages too, unless these have NVLink."""
        return f"from host {rank}" if self.link == NVLINK else f"in {rank}"

    def host_rate(self, rank: int) -> float:
        """Return the bytes per second of a copy from the host's memory to a device."""
        generation = self.device_at(rank).pcie if self.link == NVLINK else int(self.link.removeprefix(PCIE))
        return HOST_RATES[generation]

    def _port(self, way: str, rank: int, other: int) -> Resource:
        return Resource(f"{way} {rank}", self._rate(rank, other))

    def _is_through_host(self, a: int, b: int) -> bool:
        return self.link != NVLINK and not (self.device_at(a).peers and self.device_at(b).peers)

    def _rate(self, a: int, b: int) -> float:
        """Return the bytes per second of a port between two devices; half of them where they pass the host's memory."""
        if self.link == NVLINK:
            return NVLINK_FRACTION * self.device.nvlink
        generation = int(self.link.removeprefix(PCIE))
        rate = PCIE_RATES[generation]
        return rate / 2 if self._is_through_host(a, b) else rate

    def assumptions(self) -> Iterator[str]:
        """Yield what is assumed of its links, which were not measured, and how far off such predictions have been."""
        through_host = any(self._is_through_host(each, each) for each in range(self.devices_per_host))
        rate = min(self._rate(each, each) for each in range(self.devices_per_host))
        way = ", through the host's memory" if through_host else ""
        yield f"{self.link}: {rate / GB:.3g} GB/s per device and direction{way}"
        if self.network:
            latency = 1e6 * NETWORKS[self.network.rstrip("0123456789")]
            yield f"{self.network}: {LINE_FRACTION:.0%} of its rate, {latency:.0f} µs per message"
        one, several = (
            " to ".join(f"{1 + each:.2f}" for each in off) for off in (PUBLISHED_OFF, PUBLISHED_OFF_OF_SEVERAL)
        )
        yield f"range: predicted times were {one} times published ones of one device, {several} times those of several"

    def __str__(self) -> str:
        kinds = groupby(self.device_at(number).name for number in range(self.devices_per_host))
        host = f"{'+'.join(f'{len(list(alike))}x{name}' for name, alike in kinds)}-{self.link}"
        return f"{self.hosts}x({host})-{self.network}" if self.network else host


def _check_count(devices: int, whole: str) -> None:
    if devices > MOST_DEVICES:
        raise PlanError(f"machine {whole!r} has {devices:,} devices: use at most {MOST_DEVICES:,}")


def _link_of(devices: Sequence[DeviceSpec], asked: str | None, whole: str) -> str:
    """Return the link between the devices of a host. Raises PlanError for one that they have not."""
    kinds = list({each.name: each for each in devices}.values())
    has_nvlink = len(kinds) == 1 and kinds[0].nvlink
    default = NVLINK if has_nvlink else f"{PCIE}{min(each.pcie for each in kinds)}"
    link = (asked or default).lower()
    known = [*([NVLINK] if has_nvlink else []), *(f"{PCIE}{generation}" for generation in PCIE_RATES)]
    if link not in known:
        names = " with ".join(each.name for each in kinds)
        raise PlanError(f"machine {whole!r}: {names} has no link {link!r}: use {' or '.join(known)}")
    return link


def _cards(hosts: tuple[int, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("network card out", hosts[0]), ("network card in", hosts[1])
