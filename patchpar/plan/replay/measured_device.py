"""A device that was measured: rates of kernels over a grid of shapes, and two numbers from calls of a real network.

    seconds of a call  =  scale * sum of its kernels by these rates  +  overhead * their number

Rates alone are too low by what caches, clocks and the process take; `fitted` finds both numbers from two calls. On a
device that runs beside the process the overhead is what the process takes for a launch, on a CPU it comes on top: there
it is what weights and maps take that are in no cache, so that kernels of fewer bytes than were measured have none.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from patchpar.errors import PlanError
from patchpar.plan.replay.tape import Operator

HALF = ("float16", "bfloat16")
COPY, FUNCTION, NORM = "copy", "function", "norm"
FUNCTIONS = ("gelu", "silu", "tanh", "exp", "sigmoid", "softmax", "cos", "sin", "erf", "log", "sqrt")
"""Not quotients and squares: a thread makes 65,536 of them in 7 to 9 µs, as of sums, and of functions in 28 to 56."""
NORMS = ("norm", "mean", "sum", "var")
NEAR = 0.05
"""Of a log-distance: shapes that are nearer count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """FLOP/s of a kernel of these dims: (m, n, k) of a product, (keys, width) of attention."""

    dims: tuple[int, ...]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBytes:
    """Seconds of a kernel that the memory limits, which reads and writes so many bytes."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """Rates of one device in `dtype`. `memory` in bytes. `beside_host`: it runs beside the process that launches.

    `moving`: by COPY, FUNCTION and NORM, sorted by bytes. A call takes `scale` times the sum of its kernels, and
    `overhead` seconds for each that `has_overhead`. `other_dtypes`: how many times as fast as in `dtype` products are
    in others, in which a network in half precision keeps some of its layers. `other_convolutions`: the same of
    convolutions, which cuDNN computes in TF32 where they are in float32, and products are not.
    """

    name: str
    memory: int
    dtype: str
    beside_host: bool
    products: tuple[KernelRate, ...]
    convolutions: tuple[KernelRate, ...]
    attention: tuple[KernelRate, ...]
    moving: Mapping[str, tuple[MovedBytes, ...]]
    scale: float = 1.0
    overhead: float = 0.0
    other_dtypes: Mapping[str, float] = field(default_factory=dict)
    other_convolutions: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, operator: Operator) -> float:
        """Return the seconds of one operator. Raises PlanError for a product in a dtype that was not measured."""
        found = self.scale * self.by_rates(operator)
        return found if self.beside_host or not self.has_overhead(operator) else found + self.overhead

    def has_overhead(self, operator: Operator) -> bool:
        """Whether an operator is a launch, or, on a CPU, has a weight or maps that may be in no cache."""
        if self.beside_host or operator.flops:
            return True
        return operator.num_bytes >= self.moving[kind_of(operator.name)][0].num_bytes

    def by_rates(self, operator: Operator) -> float:
        """Return the seconds by rates alone. Raises PlanError, see `seconds`."""
        if not operator.flops:
            return _between(self.moving[kind_of(operator.name)], operator.num_bytes)
        as_fast = self._as_fast_in(operator)
        if operator.name == "attention":
            return operator.flops / (as_fast * _rate(self.attention, operator.dims[1:]))
        rates = self.convolutions if "convolution" in operator.name else self.products
        return operator.flops / (as_fast * _rate(rates, operator.dims))

    def _as_fast_in(self, operator: Operator) -> float:
        """Return how many times as fast as in the measured dtype a product or a convolution is in its own."""
        dtype = operator.dtype
        if dtype == self.dtype or (dtype in HALF and self.dtype in HALF):
            return 1.0
        is_convolution = "convolution" in operator.name
        found = (self.other_convolutions if is_convolution else self.other_dtypes).get(dtype)
        if found is None:
            raise PlanError(
                f"{operator.name} in {dtype}: {self.name} was measured in {self.dtype}; measure it again with "
                f"patchpar tune --dtype {dtype}"
            )
        return found

    @property
    def launch(self) -> float:
        """Seconds that the process takes to launch a kernel while the device computes another."""
        return self.overhead if self.beside_host else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCall:
    """A call of a network: its operators, and the seconds it took."""

    operators: Sequence[Operator]
    seconds: float


def fitted(device: MeasuredDevice, calls: Sequence[MeasuredCall]) -> MeasuredDevice:
    """Return the device with scale and overhead from a small and a large call.

    Beside the process: the small call may be as long as its launches, the large one as its kernels. On a CPU both
    numbers solve two equations; where that would make one of them negative, it is 0.
    """
    sums = [sum(map(device.by_rates, call.operators)) for call in calls]
    counts = [sum(map(device.has_overhead, call.operators)) for call in calls]
    times = [call.seconds for call in calls]
    if device.beside_host:
        return replace(device, scale=times[-1] / sums[-1], overhead=times[0] / counts[0])
    scale, overhead = _solved(sums, counts, times)
    return replace(device, scale=scale, overhead=overhead)


def _solved(sums: Sequence[float], counts: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Return (s, o) with the least relative errors of s * sum + o * count, neither of them negative."""
    a = [each / time for each, time in zip(sums, times, strict=True)]
    b = [each / time for each, time in zip(counts, times, strict=True)]
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        scale, overhead = (sum(a) * bb - sum(b) * ab) / determinant, (sum(b) * aa - sum(a) * ab) / determinant
        if scale > 0 and overhead >= 0:
            return scale, overhead
    return sum(a) / aa, 0.0


def _dot(x: Iterable[float], y: Iterable[float]) -> float:
    return sum(p * q for p, q in zip(x, y, strict=True))


def kind_of(name: str) -> str:
    """Return COPY, FUNCTION or NORM: of an operator that the memory limits."""
    if any(part in name for part in NORMS):
        return NORM
    return FUNCTION if any(part in name for part in FUNCTIONS) else COPY


def _rate(rates: Sequence[KernelRate], dims: Sequence[int]) -> float:
    """Return FLOP/s between measured shapes: the inverse of a mean of seconds per FLOP, near shapes count most."""
    weighted = total = 0.0
    for each in rates:
        weight = (_distance(each.dims, dims) + NEAR) ** -4
        weighted, total = weighted + weight / each.rate, total + weight
    return total / weighted


def _distance(a: Sequence[int], b: Sequence[int]) -> float:
    return math.dist([math.log(max(1, each)) for each in a], [math.log(max(1, each)) for each in b])


def _between(points: Sequence[MovedBytes], num_bytes: int) -> float:
    """Return seconds on the line through the two nearest points, and no less than the least."""
    for low, high in pairwise(points):
        if num_bytes <= high.num_bytes or high is points[-1]:
            slope = (high.seconds - low.seconds) / (high.num_bytes - low.num_bytes)
            return max(points[0].seconds / 2, low.seconds + slope * (num_bytes - low.num_bytes))
    return points[0].seconds
