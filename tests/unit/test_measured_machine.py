"""Prices of a measured device are those of its kernels and calls; links of one class are found, and what they share."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest

from patchpar.errors import PlanError
from patchpar.plan.dataclass_json import decoded
from patchpar.plan.replay.measured_device import (
    COPY,
    FUNCTION,
    NORM,
    KernelRate,
    MeasuredCall,
    MeasuredDevice,
    MovedBytes,
    fitted,
    kind_of,
)
from patchpar.plan.replay.measured_machine import (
    LinkClass,
    MeasuredLink,
    MeasuredMachine,
    classes_of,
    shared_rate,
)
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED, Prices, kernel_seconds
from patchpar.plan.replay.replay import replay
from patchpar.plan.replay.tape import Kernel, Operator, Send, Tape, Wait

POINTS = (MovedBytes(num_bytes=1000, seconds=1e-5), MovedBytes(num_bytes=101_000, seconds=1.1e-4))
DEVICE = MeasuredDevice(
    name="CPU",
    memory=2**34,
    dtype="float32",
    beside_host=False,
    products=(KernelRate(dims=(64, 64, 64), rate=1e9), KernelRate(dims=(1024, 1024, 1024), rate=4e9)),
    convolutions=(KernelRate(dims=(1024, 64, 576), rate=2e9),),
    attention=(KernelRate(dims=(256, 64), rate=3e9),),
    moving={COPY: POINTS, FUNCTION: POINTS, NORM: POINTS},
)


def product(m: int, n: int, k: int, dtype: str = "float32") -> Operator:
    return Operator("addmm", dtype, 2 * m * n * k, 4 * (m * k + n * k + m * n), (m, n, k))


def test_rates_are_those_of_the_shapes_that_are_near() -> None:
    for size, rate in ((64, 1e9), (1024, 4e9)):
        assert DEVICE.seconds(product(size, size, size)) == pytest.approx(2 * size**3 / rate, rel=1e-3)
    between = 2 * 256**3 / DEVICE.seconds(product(256, 256, 256))
    assert 1e9 < between < 4e9
    assert DEVICE.seconds(Operator("attention", "float32", 3 * 10**9, 8, (1024, 256, 64))) == pytest.approx(1.0)
    assert DEVICE.seconds(Operator("add", "float32", 0, 51_000)) == pytest.approx(6e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, COPY) for name in ("add", "cat", "div", "pow")),
        *((name, FUNCTION) for name in ("gelu", "silu", "rsqrt")),
        *((name, NORM) for name in ("native_group_norm", "mean")),
    ],
)
def test_kinds_of_kernels_that_the_memory_limits(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_another_dtype_is_refused_and_halves_count_as_one() -> None:
    with pytest.raises(PlanError, match=r"measured in float32.*tune --dtype bfloat16"):
        DEVICE.seconds(product(64, 64, 64, "bfloat16"))
    assert replace(DEVICE, dtype="float16").seconds(product(64, 64, 64, "bfloat16")) > 0


def test_products_in_another_dtype_are_as_much_slower_as_one_of_them_was_measured() -> None:
    """A network in half precision keeps some layers in float32; without the second rate no plan of it had a price."""
    device = replace(DEVICE, dtype="bfloat16", other_dtypes={"float32": 0.25})
    attention = Operator("attention", "bfloat16", 3 * 10**9, 8, (1024, 256, 64))
    for operator in (product(64, 64, 64, "bfloat16"), attention):
        slower = operator._replace(dtype="float32")
        assert device.seconds(slower) == pytest.approx(4 * device.seconds(operator))
    tape = (product(64, 64, 64, "bfloat16"), product(64, 64, 64), Operator("add", "float32", 0, 1000))
    assert len(Prices(device).of(tape)) == 1
    assert "0.25 times as fast in float32" in " ".join(ASSUMED.lines(device))
    with pytest.raises(PlanError, match="float64"):
        device.seconds(product(64, 64, 64, "float64"))


def test_convolutions_in_another_dtype_have_a_rate_of_their_own() -> None:
    """cuDNN computes those in float32 in TF32, and products are not: SDXL's VAE decodes in float32."""
    device = replace(
        DEVICE, dtype="bfloat16", other_dtypes={"float32": 0.125}, other_convolutions={"float32": 0.5, "float64": 0.1}
    )
    half = Operator("convolution", "bfloat16", 2 * 1024 * 64 * 576, 10**6, (1024, 64, 576))
    assert device.seconds(half._replace(dtype="float32")) == pytest.approx(2 * device.seconds(half))
    assert "convolutions: 0.50 times as fast in float32, 0.10 times as fast in float64" in " ".join(
        ASSUMED.lines(device)
    )
    with pytest.raises(PlanError, match=r"convolution in float8.*tune --dtype float8"):
        device.seconds(half._replace(dtype="float8_e4m3fn"))
    with pytest.raises(PlanError, match="addmm in float64"):
        device.seconds(product(64, 64, 64, "float64"))


@pytest.mark.parametrize(("scale", "overhead"), [(1.15, 5e-5), (1.0, 0.0), (2.5, 1e-4)])
def test_scale_and_overhead_are_found_from_calls(scale: float, overhead: float) -> None:
    """And predict others: a small one, where kernels cost most, and a large one."""
    real = replace(DEVICE, scale=scale, overhead=overhead)
    small, large = [product(64, 64, 64)] * 40, [product(1024, 1024, 1024)] * 4
    calls = [MeasuredCall(operators=each, seconds=sum(map(real.seconds, each))) for each in (small, large)]
    found = fitted(DEVICE, calls)
    assert found.scale == pytest.approx(scale, rel=1e-6)
    assert found.overhead == pytest.approx(overhead, abs=1e-9)
    other = [product(512, 512, 512)] * 7
    assert sum(map(found.seconds, other)) == pytest.approx(sum(map(real.seconds, other)))


def test_kernels_of_a_few_bytes_take_nothing_beyond_their_rate_on_a_cpu() -> None:
    """Overhead is what caches and pages take: tensors below the smallest that was measured are in the caches.

    A step with stale values has hundreds of such kernels, for moments, in the place of exchanges.
    """
    real = replace(DEVICE, scale=1.2, overhead=5e-5)
    tiny, small = Operator("mul", "float32", 0, POINTS[0].num_bytes - 1), Operator("mul", "float32", 0, 1000)
    assert real.seconds(tiny) == pytest.approx(real.scale * real.by_rates(tiny))
    assert real.seconds(small) == pytest.approx(real.scale * real.by_rates(small) + real.overhead)
    assert real.seconds(product(1, 1, 1)) > real.overhead  # its weight comes from the memory
    calls = [[*[product(64, 64, 64)] * 40, *[tiny] * 1000], [product(1024, 1024, 1024)] * 4]
    found = fitted(DEVICE, [MeasuredCall(operators=each, seconds=sum(map(real.seconds, each))) for each in calls])
    assert found.overhead == pytest.approx(5e-5)
    beside = fitted(replace(DEVICE, beside_host=True), [MeasuredCall(operators=each, seconds=1.0) for each in calls])
    assert beside.overhead == pytest.approx(1.0 / len(calls[0]))  # each is a launch


def test_numbers_are_never_negative() -> None:
    calls = [MeasuredCall(operators=[product(64, 64, 64)] * n, seconds=t) for n, t in ((40, 1e-6), (41, 1.0))]
    found = fitted(DEVICE, calls)
    assert found.scale > 0 <= found.overhead


def test_beside_the_process_launches_and_kernels_run_at_the_same_time() -> None:
    device = replace(DEVICE, beside_host=True, scale=2.0, overhead=3.0)
    add = Operator("add", "float32", 0, 1000)
    assert kernel_seconds(add, device) == pytest.approx(2e-5)
    (kernel,) = Prices(device).of((add, add))
    assert isinstance(kernel, Kernel)
    assert kernel.host == 6.0
    (graph,) = Prices(device, AS_GRAPH).of((add, add))
    assert isinstance(graph, Kernel)
    assert graph.host == 0.0
    (on_cpu,) = Prices(replace(device, beside_host=False)).of((add, add))
    assert isinstance(on_cpu, Kernel)
    assert on_cpu.host == 0.0
    assert on_cpu.seconds == pytest.approx(2 * (2e-5 + 3.0))


def link(a: int, b: int, rate: float, latency: float = 1e-5) -> MeasuredLink:
    return MeasuredLink(pair=(a, b), latency=latency, rate=rate)


def test_pairs_that_are_alike_are_a_class() -> None:
    """Two hosts of two devices: two fast pairs, and four slow ones."""
    slow = [link(a, b, 1e9 * (1 + 0.02 * b), 1e-4) for a in (0, 1) for b in (2, 3)]
    fast, rest = classes_of([*slow, link(0, 1, 9.8e9), link(2, 3, 1e10)])
    assert fast.pairs == ((0, 1), (2, 3))
    assert len(rest.pairs) == 4
    assert fast.rate > 9e9 > 1.1e9 > rest.rate


def test_what_pairs_share_is_seen_when_all_send() -> None:
    pairs = LinkClass(pairs=((0, 1), (2, 3)), latency=0.0, rate=10.0)
    assert shared_rate(pairs, {(0, 1): 20.0, (2, 3): 19.0}) == math.inf
    assert shared_rate(pairs, {(0, 1): 10.0, (2, 3): 10.0}) == 20.0


def test_messages_of_a_class_share_its_rate() -> None:
    shared = LinkClass(pairs=((0, 1), (2, 3)), latency=1.0, rate=10.0, shared=10.0)
    between = LinkClass(pairs=((0, 2), (0, 3), (1, 2), (1, 3)), latency=2.0, rate=5.0)
    machine = MeasuredMachine(device=DEVICE, devices=4, links=(shared, between))

    def seconds(*pairs: tuple[int, int]) -> float:
        tapes: list[Tape] = [()] * 4
        for a, b in pairs:
            tapes[a], tapes[b] = (Send(0, (b,), "kv", 100),), (Wait(0, a, 100),)
        return replay(tapes, machine.topology()).seconds

    assert seconds((0, 1)) == pytest.approx(11.0)
    assert seconds((0, 1), (2, 3)) == pytest.approx(21.0)
    assert seconds((0, 2)) == pytest.approx(22.0)
    assert not machine.is_uniform
    assert replace(machine, links=(shared,)).is_uniform


def test_copies_from_the_host_have_the_rate_that_was_measured() -> None:
    machine = MeasuredMachine(device=DEVICE, devices=1, links=(), host=10.0)
    tape: Tape = (Send(0, (0,), "host", 100, bulk=True), Wait(0, 0, 100))
    assert replay([tape], machine.topology()).seconds == pytest.approx(10.0)
    with pytest.raises(PlanError, match="were not measured: run patchpar tune"):
        replay([tape], replace(machine, host=0.0).topology())


def test_a_device_that_no_link_reaches_is_named() -> None:
    machine = MeasuredMachine(device=DEVICE, devices=3, links=(LinkClass(pairs=((0, 1),), latency=0.0, rate=1.0),))
    tapes: list[Tape] = [(Send(0, (2,), "kv", 8),), (), (Wait(0, 0, 8),)]
    with pytest.raises(PlanError, match="no link between devices 0 and 2"):
        replay(tapes, machine.topology())


def test_a_measurement_comes_back_from_its_file() -> None:
    links = (LinkClass(pairs=((0, 1),), latency=1e-5, rate=1e9),)
    machine = MeasuredMachine(
        device=replace(DEVICE, other_dtypes={"float16": 0.5}, other_convolutions={"float16": 0.75}),
        devices=2,
        links=links,
    )
    assert decoded(MeasuredMachine, json.loads(json.dumps(asdict(machine)))) == machine
