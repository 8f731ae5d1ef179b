"""Seconds of kernels on a device that was measured, or on one of the catalogue, for which `ASSUMED` is assumed.

matrix product     FLOPs at a share of the device's rate, less where its tiles do not fill the processors; where those
                   compute parts of the inner dim, the parts are written and added up
convolution        the same at a smaller share, after its maps are read and written in the layout of the kernel
attention          FLOPs at another share, of heads whose width is filled up to a multiple of 32
fp32               convolutions in the rate of TF32, as torch computes them; matrix products in that of fp32
all others         bytes at a share of the memory's rate, or at the cache's where they fit into it
weights            come from the memory: a network has more of them than a cache holds
group norm         reads its maps twice, for moments and for values
RMS norm           one kernel, which has a block of threads for each row, however narrow it is
all                a gap to the kernel before, for each kernel that an operator launches
question           of the process for a value: it launches nothing until the device has answered
compiled           what runs between two products is one kernel, as long as the longest of them, and one for each group
                   norm's moments, which are known only after the last of its values
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby

from patchpar.errors import PlanError
from patchpar.plan.replay.device_catalogue import DeviceSpec
from patchpar.plan.replay.measured_device import MeasuredDevice
from patchpar.plan.replay.occupancy import Processors, product_seconds, seconds_of_rows
from patchpar.plan.replay.process_work import Exchanges, OuterBlocks, is_copy
from patchpar.plan.replay.tape import QUESTIONS, Boundary, Kernel, Operator, Tape, TapeEntry

LAUNCHES: Mapping[str, int] = {"native_group_norm": 3, "convolution": 2, "_linalg_solve_ex": 8, "nonzero": 4}
"""Kernels of operators that launch several: moments, their combination and the affine; a product and its bias."""
WIDTHS = 32
"""Widths of attention heads that kernels know are multiples of it."""
SIZES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
"""Bytes of an element."""
LAYOUT_KERNELS = 3
"""Of a convolution whose maps have another layout: they change that of its input, its weight and its output."""
GROUP_NORM, MOMENTS, NORMED = "native_group_norm", "moments of a group norm", "values of a group norm"
RMS_NORM = "_fused_rms_norm"
BETWEEN_ACTIVATIONS = ("bmm", "baddbmm")
"""Products of two activations, which have no weight."""

Device = DeviceSpec | MeasuredDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAssumptions:
    """What no data sheet says. Seconds, and shares of published rates.

    `launch`: the process launches a kernel from eager code, 0 in a CUDA graph. `message`: it makes an exchange, with
    all Python around it, in the layer too. `gap`: of the device between two kernels.
    `convolution_fraction`: of what products of matrices reach. `attention_part`: of what attention reaches on the
    device, with an older kernel. `channels_last`: maps have the layout of convolutions. `fused`: kernels between two
    products are one. `scale`: of the seconds of kernels, by a call that was measured. `region`: the process begins
    compiled code, whose guards it checks; compiled code ends where a value is asked for.
    """

    launch: float = 30e-6
    message: float = 125e-6
    gap: float = 2e-6
    memory_fraction: float = 0.8
    convolution_fraction: float = 0.7
    attention_part: float = 1.0
    channels_last: bool = False
    fused: bool = False
    scale: float = 1.0
    region: float = 0.0

    def lines(self, device: Device) -> Iterator[str]:
        """Yield them as sentences."""
        if isinstance(device, MeasuredDevice):
            launch = device.launch if self.launch else 0.0
            yield f"{device.name}: kernels by rates measured in {device.dtype}, times {device.scale:.2f}"
            for kernels, rates in (("products", device.other_dtypes), ("convolutions", device.other_convolutions)):
                others = ", ".join(f"{rate:.2f} times as fast in {name}" for name, rate in rates.items())
                if others:
                    yield f"{kernels}: {others}, by one of them"
            yield f"process: measured, {1e6 * (launch or device.overhead):.1f} µs per kernel"
            return
        yield (
            f"{device.name}: {device.matmul_fraction:.0%} of its published FLOP/s in large products, "
            f"{device.attention_fraction:.0%} in attention; all other kernels at {self.memory_fraction:.0%} of "
            f"the rate of its memory, or {device.cache_rate / 1e12:.1f} TB/s where they fit its cache"
        )
        yield f"process: {1e6 * self.launch:.0f} µs per launch, {1e6 * self.message:.0f} µs per exchange"


ASSUMED = CostAssumptions()
AS_GRAPH = CostAssumptions(launch=0.0, message=0.0)
"""The process launches one graph for a step."""
COMPILED = CostAssumptions(launch=0.0, message=0.0, fused=True)
"""The same, with what runs between two products fused by a compiler."""
BLOCKS_COMPILED = CostAssumptions(launch=12e-6, region=176e-6, fused=True)
"""The process launches each of the kernels that a compiler has fused, and begins compiled code in each block.

What it takes to begin is by https://github.com/pytorch/pytorch/issues/150488; a launch by the forwards with compiled
blocks of docs/figures/gpu.md, less their beginnings, on a host that took twice as long as is assumed for eager code.
"""


def kernel_seconds(operator: Operator, device: Device, assumed: CostAssumptions = ASSUMED) -> float:
    """Return the seconds of one operator. Raises PlanError for a product in a dtype the device has no rate for."""
    if isinstance(device, MeasuredDevice):
        return device.seconds(operator)
    return assumed.scale * _catalogue_seconds(operator, device, assumed)


def _catalogue_seconds(operator: Operator, device: DeviceSpec, assumed: CostAssumptions) -> float:
    gaps = assumed.gap * _kernels_of(operator, assumed)
    moving = _moving(operator, device, assumed)
    if operator.name == RMS_NORM and not assumed.fused:
        return max(moving, seconds_of_rows(operator.dims[0], device.processors)) + gaps
    if not operator.flops:
        return moving + gaps
    rate = _peak(operator, device)
    if rate is None:
        raise PlanError(
            f"{operator.name} in {operator.dtype}: the catalogue has no rate of {device.name} for it; use --dtype with "
            f"one of {', '.join(device.flops)}"
        )
    if operator.name == "attention":
        width = operator.dims[-1]
        computed = operator.flops * _rounded_up(width, WIDTHS) / width
        reached = assumed.attention_part * device.attention_fraction * rate
        return max(computed / reached, moving) + gaps
    computing = _computing(operator, device, rate, assumed)
    if "convolution" in operator.name:
        in_layout = 0.0 if assumed.channels_last else 2 * moving
        return max(computing, moving) + in_layout + _bias_seconds(operator, device, assumed) + gaps
    return max(computing, moving) + gaps


def _computing(operator: Operator, device: DeviceSpec, rate: float, assumed: CostAssumptions) -> float:
    """Return the seconds in which the processors compute a product or a convolution. `rate`: FLOP/s by the sheet."""
    fraction = device.matmul_fraction * (assumed.convolution_fraction if "convolution" in operator.name else 1.0)
    processors = Processors(number=device.processors, rate=fraction * rate, cache_rate=device.cache_rate)
    return product_seconds(operator.flops, operator.dims, processors)


def _peak(operator: Operator, device: DeviceSpec) -> float | None:
    """Return the FLOP/s of an operator's dtype; None for one that is not in the catalogue."""
    if device.tf32 and operator.dtype == "float32" and "convolution" in operator.name:
        return max(device.tf32 * device.flops["float16"], device.flops["float32"])
    return device.flops.get(operator.dtype)


def _kernels_of(operator: Operator, assumed: CostAssumptions) -> int:
    """Return how many kernels an operator launches; compiled, a bias is a part of what follows."""
    in_layout = LAYOUT_KERNELS if "convolution" in operator.name and not assumed.channels_last else 0
    return in_layout + (1 if assumed.fused else LAUNCHES.get(operator.name, 1))


def _moving(operator: Operator, device: DeviceSpec, assumed: CostAssumptions) -> float:
    """Return the seconds in which an operator's tensors are read and written once, those of group norms twice."""
    rate = assumed.memory_fraction * device.memory_rate
    weight = min(_weight_bytes(operator), operator.num_bytes)
    others = operator.num_bytes - weight
    if operator.name == GROUP_NORM:
        others += others // 2  # its input again, for the moments
    return weight / rate + others / (device.cache_rate if others <= device.cache else rate)


def _bias_seconds(operator: Operator, device: DeviceSpec, assumed: CostAssumptions) -> float:
    """Return the seconds in which eager code adds the bias of a convolution to its result [m, n]."""
    if assumed.fused:
        return 0.0
    m, n, _ = operator.dims
    added = operator._replace(name="add_", flops=0, num_bytes=2 * m * n * SIZES.get(operator.dtype, 0), dims=())
    return _moving(added, device, assumed)


def _weight_bytes(operator: Operator) -> int:
    """Return the bytes of the weight [n, k] of a product or a convolution; 0 for other operators."""
    if not operator.flops or operator.name in ("attention", *BETWEEN_ACTIVATIONS):
        return 0
    _, n, k = operator.dims
    return n * k * SIZES.get(operator.dtype, 0)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class Prices:
    """Prices of tapes on one device. Most runs of operators come again in every block and on other ranks."""

    def __init__(self, device: Device, assumed: CostAssumptions = ASSUMED) -> None:
        self._device, self._assumed = device, assumed
        self._launch, self._message, self._region = assumed.launch, assumed.message, assumed.region
        if isinstance(device, MeasuredDevice):
            self._launch = device.launch if assumed.launch else 0.0
            self._message = assumed.message if device.beside_host else 0.0  # else it is in the latency of a link
        self._kernels: dict[Operator, Kernel] = {}
        self._runs: dict[tuple[int, ...], tuple[Kernel, Sequence[Operator]]] = {}  # by ids of operators that are kept

    def of(self, tape: Iterable[TapeEntry]) -> Tape:
        """Return a tape with kernels instead of operators. All that run between two other entries are one kernel.

        Raises PlanError, see `kernel_seconds`.
        """
        return tuple(self._entries(tape))

    def _entries(self, tape: Iterable[TapeEntry]) -> Iterator[TapeEntry]:
        block, run = "", list[Operator]()
        blocks, exchanges = OuterBlocks(), Exchanges()
        for entry in tape:
            if isinstance(entry, Operator):
                run.append(entry)
                if entry.name in QUESTIONS:
                    yield self._kernel(block, run)._replace(waits=True)
                    yield from self._region_begins(block)
                    run = []
                continue
            begun = self._message if exchanges.begins(entry) else self._launch if is_copy(entry) else 0.0
            if run or begun:
                yield self._kernel(block, run, begun)
                run = []
            if isinstance(entry, Boundary):
                block = entry.name
            yield entry
            if isinstance(entry, Boundary) and blocks.begins(entry):
                yield from self._region_begins(block)
        if run:
            yield self._kernel(block, run)

    def _region_begins(self, block: str) -> Iterator[Kernel]:
        if self._region:
            yield Kernel(block, 0.0, self._region)

    def _kernel(self, block: str, run: Sequence[Operator], begun: float = 0.0) -> Kernel:
        """Return the kernel that stands for a run of operators, and for what the process has begun after it."""
        kernels = [self._of_run(run)] if run else []
        if begun:
            kernels.append(Kernel(block, 0.0, begun))
        found = reduce(Kernel.then, kernels)
        return Kernel(block, found.seconds, found.host, found.lag)

    def _of_run(self, run: Sequence[Operator]) -> Kernel:
        key = tuple(map(id, run))
        if key not in self._runs:
            operators = fused(run) if self._assumed.fused else run
            self._runs[key] = reduce(Kernel.then, map(self._of_operator, operators)), run
        return self._runs[key][0]

    def _of_operator(self, operator: Operator) -> Kernel:
        if operator not in self._kernels:
            host = LAUNCHES.get(operator.name, 1) * self._launch
            self._kernels[operator] = Kernel(operator.name, kernel_seconds(operator, self._device, self._assumed), host)
        return self._kernels[operator]


def fused(run: Sequence[Operator]) -> Iterator[Operator]:
    """Yield the operators of a compiled run: of those between two products the one that moves most bytes.

    And before it one for the moments of each group norm among them.
    """
    for is_product, between in groupby(run, lambda operator: operator.flops > 0):
        operators = list(between)
        if is_product:
            yield from operators
            continue
        yield from (each._replace(name=MOMENTS, num_bytes=each.num_bytes // 2) for each in operators if _is_norm(each))
        longest = max(operators, key=lambda operator: operator.num_bytes)
        yield longest._replace(name=NORMED) if _is_norm(longest) else longest


def _is_norm(operator: Operator) -> bool:
    return operator.name == GROUP_NORM
