"""Seconds of kernels on a device of the catalogue. Nothing is measured: `ASSUMED` says what is taken for granted.

matrix product     FLOPs at a share of the device's rate, less for few rows: m / (m + 384)
attention          FLOPs at another share
all others         bytes at a share of the memory's rate
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from patchpar.errors import PlanError
from patchpar.plan.replay.device_catalogue import DeviceSpec
from patchpar.plan.replay.tape import Boundary, Kernel, Operator, Send, Tape, TapeEntry, Wait

LAUNCHES: Mapping[str, int] = {"native_group_norm": 3, "convolution": 2, "_linalg_solve_ex": 8, "nonzero": 4}
"""Kernels of operators that launch several: moments, their combination and the affine; a product and its bias."""
ROWS_LOST = 384
ROWS_FULL = 2048
"""Rows of a matrix product from which the share of the device's rate holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAssumptions:
    """What no data sheet says. Seconds, and shares of published rates.

    `launch`: the process launches a kernel, 0 in a CUDA graph. `message`: it starts an exchange. `shortest`: kernel.
    """

    launch: float = 6e-6
    message: float = 15e-6
    shortest: float = 2e-6
    memory_fraction: float = 0.8

    def lines(self, device: DeviceSpec) -> Iterator[str]:
        """Yield them as sentences."""
        yield (
            f"{device.name}: {device.matmul_fraction:.0%} of its published FLOP/s in large products, "
            f"{device.attention_fraction:.0%} in attention; all other kernels at {self.memory_fraction:.0%} of "
            "the rate of its memory"
        )
        yield f"process: {1e6 * self.launch:.0f} µs per launch, {1e6 * self.message:.0f} µs per exchange"


ASSUMED = CostAssumptions()
AS_GRAPH = CostAssumptions(launch=0.0, message=0.0)
"""The process launches one graph for a step."""


def kernel_seconds(operator: Operator, device: DeviceSpec, assumed: CostAssumptions = ASSUMED) -> float:
    """Return the seconds of one operator. Raises PlanError for a product in a dtype the device has no rate for."""
    moving = operator.num_bytes / (assumed.memory_fraction * device.memory_rate)
    if not operator.flops:
        return max(moving, assumed.shortest)
    rate = device.flops.get(operator.dtype)
    if rate is None:
        raise PlanError(
            f"{operator.name} in {operator.dtype}: the catalogue has no rate of {device.name} for it; use --dtype with "
            f"one of {', '.join(device.flops)}"
        )
    if operator.name == "attention":
        fraction = device.attention_fraction
    else:
        fraction = device.matmul_fraction * min(1.0, _filled(operator.dims[0]) / _filled(ROWS_FULL))
    return max(operator.flops / (fraction * rate), moving, assumed.shortest)


def _filled(rows: int) -> float:
    return rows / (rows + ROWS_LOST)


def priced(tape: Iterable[TapeEntry], device: DeviceSpec, assumed: CostAssumptions = ASSUMED) -> Tape:
    """Return a tape with kernels instead of operators. All that run between two other entries are one kernel."""
    return tuple(_merged(_kernels(tape, device, assumed)))


def _kernels(tape: Iterable[TapeEntry], device: DeviceSpec, assumed: CostAssumptions) -> Iterator[TapeEntry]:
    known: dict[Operator, Kernel] = {}
    where = ""
    for entry in tape:
        if isinstance(entry, Operator):
            if entry not in known:
                host = LAUNCHES.get(entry.name, 1) * assumed.launch
                known[entry] = Kernel(entry.name, kernel_seconds(entry, device, assumed), host)
            yield known[entry]
            continue
        if isinstance(entry, Send) and entry.where != where:  # the first message of an exchange
            yield Kernel(entry.where, 0.0, assumed.message)
        where = entry.where if isinstance(entry, (Send, Wait)) else ""
        yield entry


def _merged(tape: Iterable[TapeEntry]) -> Iterator[TapeEntry]:
    block, run = "", None
    for entry in tape:
        if isinstance(entry, Kernel):
            run = Kernel(block, entry.seconds, entry.host, entry.lag) if run is None else run.then(entry)
            continue
        if run is not None:
            yield run
            run = None
        if isinstance(entry, Boundary):
            block = entry.name
        yield entry
    if run is not None:
        yield run
