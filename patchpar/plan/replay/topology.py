"""What messages pass between two ranks: resources that they take one after the other, and a latency."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from patchpar.errors import PlanError


@dataclass(frozen=True, slots=True)
class Resource:
    """A port, a switch or a network card that passes `rate` bytes per second. Equal names are one resource.

    Raises PlanError.
    """

    name: str
    rate: float = math.inf

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise PlanError(f"{self.name} passes {self.rate!r} bytes/s: use a rate > 0")


@dataclass(frozen=True, slots=True)
class Route:
    """The resources from one rank to another, in order, and the latency in seconds. Raises PlanError."""

    resources: tuple[Resource, ...]
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise PlanError(f"latency={self.latency!r} s: use a finite latency >= 0")


@dataclass(frozen=True, slots=True)
class Topology:
    """`path(a, b)`: the route of a message from rank a to rank b, of one to itself from the host's memory."""

    path: Callable[[int, int], Route]


def equal_ports(rate: float, latency: float = 0.0) -> Topology:
    """Return a switch without a limit: each rank has one port out and one in, of `rate` bytes per second."""
    return Topology(lambda a, b: Route((Resource(f"out {a}", rate), Resource(f"in {b}", rate)), latency))
