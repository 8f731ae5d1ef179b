"""Machines are read by name; what cannot be read is refused with the nearest; prices obey the data sheet."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from patchpar.errors import PlanError
from patchpar.plan.replay.device_catalogue import DEVICES
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.machine_names import device_named
from patchpar.plan.replay.occupancy import Processors, product_seconds
from patchpar.plan.replay.price import AS_GRAPH, ASSUMED, COMPILED, RMS_NORM, Prices, fused, kernel_seconds
from patchpar.plan.replay.replay import replay
from patchpar.plan.replay.tape import COPIED, Boundary, Kernel, Leave, Operator, Receive, Send, Tape, Wait

GPU = Path(__file__).parents[2] / "docs/figures/gpu.json"


@pytest.mark.parametrize(
    ("text", "devices", "printed"),
    [
        ("8xH100-nvlink", 8, "8xH100-nvlink"),
        ("8xh100", 8, "8xH100-nvlink"),
        ("4xRTX4090-pcie4", 4, "4xRTX4090-pcie4"),
        ("rtx 4090", 1, "1xRTX4090-pcie4"),
        ("2x(4xL40-pcie4)-eth100", 8, "2x(4xL40-pcie4)-eth100"),
        ("125x(8xH100)-ib400", 1000, "125x(8xH100-nvlink)-ib400"),
        ("rtx5090 + 2xrtx4090", 3, "1xRTX5090+2xRTX4090-pcie4"),
        ("1xH100+1xA100+1xH100-pcie5", 3, "1xH100+1xA100+1xH100-pcie5"),
        ("2x(1xH100+1xL40)-eth100", 4, "2x(1xH100+1xL40-pcie4)-eth100"),
        ("2xA100+2xA100", 4, "4xA100-nvlink"),
    ],
)
def test_a_name_is_read_and_printed(text: str, devices: int, printed: str) -> None:
    machine = Machine.parse(text)
    assert machine.devices == devices
    assert str(machine) == printed
    assert Machine.parse(printed) == machine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH10O-nvlink", "the nearest is H100"),
        ("4xRTX4080", "the nearest is RTX4090"),
        ("4xRTX4090-nvlink", "RTX4090 has no link 'nvlink': use pcie3 or pcie4 or pcie5"),
        ("8xH100-nvlnk", "no link 'nvlnk': use nvlink"),
        ("0xH100", "has no device"),
        ("1xH100+0xA100", "has no device"),
        ("999999999xH100", "has 999,999,999 devices: use at most 100,000"),
        ("20000x(8xH100)-ib400", "has 160,000 devices: use at most 100,000"),
        ("9999999999xH100", "cannot be read"),
        ("1xH100+1xA1000", "the nearest is A100"),
        ("nosuch", "no device 'nosuch' in the catalogue: use one of A100, H100"),
        ("1xH100+1xA100-nvlink", "H100 with A100 has no link 'nvlink': use pcie3"),
        ("1xH100-pcie4+1xA100-pcie4", "cannot be read"),
        ("2x(4xL40-pcie4)-wifi100", "no network 'wifi'"),
        ("0x(4xL40-pcie4)-eth100", "at least 1"),
        ("eight H100s, please", "cannot be read, the nearest is 1xH100: use the form 8xH100-nvlink"),
        ("eight cards, please", "cannot be read: use the form 8xH100-nvlink"),
        ("", "cannot be read"),
    ],
)
def test_a_name_that_cannot_be_read_is_refused_with_a_way_out(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Machine.parse(text)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("8H100", "8xH100"),
        ("8*H100", "8xH100"),
        ("8-H100", "8xH100"),
        ("8h10o", "8xH100"),
        ("4x4090-pcie4", "4xRTX4090-pcie4"),
        ("2x(8xH100)", "2x(8xH100)-ib400"),
        ("2x8xH100-eth100", "2x(8xH100)-eth100"),
        ("1L40S+1A100", "1xL40S+1xA100"),
        ("1xH100-pcie4+1xA100-pcie4", "1xH100+1xA100-pcie4"),
    ],
)
def test_the_nearest_name_that_can_be_read_is_named(text: str, nearest: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"machine {text!r} cannot be read, the nearest is {nearest}: use")):
        Machine.parse(text)
    assert Machine.parse(nearest).devices >= 2


def exchange(size: int, ranks: int) -> list[Tape]:
    return [(Send(0, (rank ^ 1,), "kv", size), Wait(0, rank ^ 1, size, kind="kv")) for rank in range(ranks)]


def test_messages_between_hosts_share_the_network_card() -> None:
    """One pair between two hosts, and four: the card passes 12.5 GB/s at most."""
    machine = Machine.parse("2x(4xH100)-eth100")
    size = 10**9

    def seconds(pairs: int) -> float:
        tapes: list[Tape] = [() for _ in range(8)]
        for rank in range(pairs):
            tapes[rank] = (Send(0, (rank + 4,), "kv", size),)
            tapes[rank + 4] = (Wait(0, rank, size),)
        return replay(tapes, machine.topology()).seconds

    assert seconds(1) == pytest.approx(size / (0.9 * 12.5e9), rel=0.01)
    assert seconds(4) == pytest.approx(4 * seconds(1), rel=0.01)


@pytest.mark.parametrize(
    ("name", "rate", "same_port"),
    [("2xRTX4090-pcie4", 25, True), ("2xH100-nvlink", 54, False), ("2xH100-pcie4", 25, True)],
)
def test_copies_from_the_host_pass_the_port_of_pcie(name: str, rate: float, same_port: bool) -> None:
    machine = Machine.parse(name)
    (port,) = machine.topology().path(1, 1).resources
    assert port.rate == rate * 1e9
    assert same_port == (port.name in {each.name for each in machine.topology().path(0, 1).resources})


def test_cards_without_peer_access_share_the_memory_of_the_host() -> None:
    two, four = (replay(exchange(10**9, ranks), Machine.parse("4xRTX4090").topology()).seconds for ranks in (2, 4))
    assert four > 1.5 * two
    peers = [replay(exchange(10**9, ranks), Machine.parse("4xL40").topology()).seconds for ranks in (2, 4)]
    assert peers[0] == pytest.approx(peers[1])
    assert peers[0] < two


def test_devices_of_several_kinds_are_known_by_number_and_pass_the_host_where_one_has_to() -> None:
    machine = Machine.parse("2x(1xL40+2xRTX4090)-eth100")
    assert [machine.device_at(number).name for number in range(6)] == ["L40", "RTX4090", "RTX4090"] * 2
    assert machine.is_mixed
    assert not machine.is_uniform
    assert not Machine.parse("4xL40").is_mixed
    peers = replay(exchange(10**9, 2), Machine.parse("1xL40+1xA100").topology()).seconds
    through_host = replay(exchange(10**9, 2), machine.topology()).seconds
    assert through_host > 1.9 * peers


def test_prices_follow_flops_and_bytes() -> None:
    device = device_named("H100")
    large = Operator("addmm", "bfloat16", 2 * 2048 * 3072 * 3072, 10**7, (2048, 3072, 3072))
    gap = 2e-6
    computing = product_seconds(large.flops, large.dims, processors(132, 792.1e12))
    assert kernel_seconds(large, device) == pytest.approx(computing + gap)
    few = Operator("addmm", "bfloat16", 2 * 64 * 3072 * 3072, 10**4, (64, 3072, 3072))
    assert few.flops / kernel_seconds(few, device) < 0.3 * large.flops / kernel_seconds(large, device)
    add = Operator("add", "bfloat16", 0, 10**9)
    assert kernel_seconds(add, device) == pytest.approx(10**9 / (0.8 * 3350e9) + gap)
    cached = Operator("add", "bfloat16", 0, 4 * 10**7)
    assert kernel_seconds(cached, device) == pytest.approx(0.04e9 / 4199e9 + gap)
    assert kernel_seconds(Operator("add", "bfloat16", 0, 8), device) == pytest.approx(gap)
    convolution = Operator("convolution", "bfloat16", large.flops, large.num_bytes, large.dims)
    assert kernel_seconds(convolution, device) > 1.4 * kernel_seconds(large, device)
    with pytest.raises(PlanError, match="no rate of H100"):
        kernel_seconds(Operator("mm", "float64", 8, 8, (2, 2, 1)), device)


@pytest.mark.parametrize(
    ("dims", "part"),
    [
        ((128 * 132, 128, 64), 1.0),  # as many tiles as processors
        ((128 * 133, 128, 64), 133 / 264),  # one more takes as long again
        ((128 * 66, 128, 1000), 0.5),  # half of the processors idle
        ((128 * 66, 128, 2048), 1.0),  # unless two of them share a tile
        ((64, 128, 64), 0.5 / 132),  # half a tile
        ((256 * 132, 128 * 2, 64), 1.0),
    ],
)
def test_processors_without_a_tile_of_a_product_idle(dims: tuple[int, ...], part: float) -> None:
    flops = 2 * math.prod(dims)
    assert product_seconds(flops, dims, processors(132, 1e12)) == pytest.approx(flops / (part * 1e12))


def processors(number: int, rate: float, cache_rate: float = math.inf) -> Processors:
    return Processors(number=number, rate=rate, cache_rate=cache_rate)


@pytest.mark.parametrize(("parts", "k"), [(2, 2048), (3, 3072), (4, 8192)])
def test_parts_of_a_product_are_written_and_added_up(parts: int, k: int) -> None:
    """In fp32: each is written, and read again. A product that gains less than that has none."""
    m, n = 128 * (132 // parts), 128
    flops, sums = 2 * m * n * k, 2 * parts * 4 * m * n
    whole = flops / (1e12 / parts)
    assert product_seconds(flops, (m, n, k), processors(132, 1e12, 1e12)) == pytest.approx(flops / 1e12 + sums / 1e12)
    gain = whole - flops / 1e12
    assert product_seconds(flops, (m, n, k), processors(132, 1e12, 0.99 * sums / gain)) == pytest.approx(whole)


def test_a_small_product_of_a_deep_dim_pays_for_its_sums() -> None:
    """As of a feed-forward network's second Linear on a part of an image: 40 tiles of 512 x 1280 on an H200."""
    device, dims = device_named("H200"), (512, 1280, 5120)
    operator = Operator("addmm", "float16", 2 * math.prod(dims), 2 * (512 * 5120 + 5120 * 1280 + 512 * 1280), dims)
    free = replace(device, cache_rate=math.inf)
    sums = 2 * 3 * 4 * 512 * 1280 / device.cache_rate
    assert kernel_seconds(operator, device) == pytest.approx(kernel_seconds(operator, free) + sums)


def rms_norm(rows: int, width: int) -> Operator:
    """Of bf16: it reads and writes its values, and writes a factor in fp32 for each row."""
    return Operator(RMS_NORM, "bfloat16", 0, rows * (4 * width + 4), (rows, width))


def test_a_norm_of_narrow_rows_takes_as_long_as_their_blocks_of_threads() -> None:
    """1,024 rows for each processor of an H200, which has 16 at a time; wide ones take what their bytes take."""
    device, rows = device_named("H200"), 1024 * 132
    assert kernel_seconds(rms_norm(rows, 128), device) == pytest.approx(64 * 1.35e-6 + 2e-6)
    assert kernel_seconds(rms_norm(rows, 64), device) == kernel_seconds(rms_norm(rows, 128), device)
    wide = rms_norm(rows, 4096)
    assert kernel_seconds(wide, device) == kernel_seconds(wide._replace(name="mul", dims=()), device)
    compiled = kernel_seconds(rms_norm(rows, 128), device, COMPILED)
    assert compiled == kernel_seconds(rms_norm(rows, 128)._replace(name="mul", dims=()), device, COMPILED)


def test_norms_of_the_heads_of_flux_take_as_long_as_they_were_measured_to() -> None:
    """Of 24 heads: image and text apart in 19 blocks, together in 38, with 4,096 and 512 tokens."""
    layers = next(each for each in json.loads(GPU.read_text()) if each["heading"] == "Layers of a plain forward")
    (row,) = (each for each in layers["tables"][0] if (each["model"], each["layer"]) == ("flux", "RMSNorm"))
    apart = [rms_norm(24 * tokens, 128) for tokens in (4096, 512)]
    norms = [*apart * (2 * 19), *[rms_norm(24 * (4096 + 512), 128)] * (2 * 38)]
    assert len(norms) == int(row["calls"])
    device = device_named("H200")
    assert sum(kernel_seconds(each, device) for each in norms) == pytest.approx(1e-3 * float(row["ms"]), rel=0.05)


def test_heads_of_attention_are_computed_in_widths_that_kernels_know() -> None:
    """Of width 40, as in Stable Diffusion 1.5, they take as long as of width 64."""
    device = device_named("A100")
    seconds = [
        kernel_seconds(Operator("attention", "float16", 4 * 65536 * 4096 * width, 8, (65536, 4096, width)), device)
        for width in (40, 64)
    ]
    assert seconds[0] == pytest.approx(seconds[1])


def test_a_priced_tape_joins_kernels_between_messages() -> None:
    add = Operator("add", "float16", 0, 8)
    tape: Tape = (Boundary("block"), add, add, Send(0, (1,), "kv", 4, "a"), Send(0, (2,), "kv", 4, "a"), add, add)
    found = Prices(device_named("A100")).of(tape)
    assert [type(entry) for entry in found] == [Boundary, Kernel, Send, Send, Kernel]
    kernels = [entry for entry in found if isinstance(entry, Kernel)]
    assert sum(each.seconds for each in kernels) == pytest.approx(4 * 2e-6, rel=1e-4)
    assert sum(each.host for each in kernels) == pytest.approx(4 * ASSUMED.launch + ASSUMED.message)
    assert not sum(each.host for each in Prices(device_named("A100"), AS_GRAPH).of(tape) if isinstance(each, Kernel))


def test_each_operation_of_an_exchange_point_takes_the_process_its_time() -> None:
    """A ring has one for each rank but one, of a message that leaves and one that comes. Copies are launches."""
    turns = [(Send(at, (1,), "kv", 4, "a", operation=at + 1), Receive(at, 1, "a")) for at in range(3)]
    waits = [(Wait(at, 1, 4, "a"), Leave(at + 1, "a")) for at in range(3)]
    ring: Tape = tuple(entry for at in range(3) for entry in (*turns[at], *waits[at]))
    ahead: Tape = (
        Receive(0, 1, "b"),
        Send(0, (1,), "kv", 4, "b", operation=1),
        Send(1, (2,), "kv", 4, "b", operation=1),
    )
    copy: Tape = (Boundary("block"), Send(0, (0,), COPIED, 4, "block", bulk=True), Wait(0, 0, 4, "block"))
    for tape, expected in (
        (ring, 3 * ASSUMED.message),
        (ahead, ASSUMED.message),
        (ahead + ring, 4 * ASSUMED.message),
        (copy, ASSUMED.launch),
    ):
        found = Prices(device_named("A100")).of(tape)
        assert sum(each.host for each in found if isinstance(each, Kernel)) == pytest.approx(expected)


def test_what_a_compiler_fuses_is_as_long_as_its_longest_part() -> None:
    product = Operator("mm", "float16", 2 * 512**3, 3 * 2 * 512**2, (512, 512, 512))
    small, large = Operator("add", "float16", 0, 10**6), Operator("gelu", "float16", 0, 10**9)
    run = (small, large, small, product, small, small)
    assert list(fused(run)) == [large, product, small]
    eager, compiled = (Prices(device_named("A100"), each).of(run)[0] for each in (AS_GRAPH, COMPILED))
    assert isinstance(eager, Kernel)
    assert isinstance(compiled, Kernel)
    assert compiled.seconds < eager.seconds


def test_weights_come_from_the_memory_and_activations_from_the_cache() -> None:
    """A product of few rows is limited by its weight, also one that would fit the cache; one of two activations not."""
    device, (m, n, k) = device_named("A100"), (128, 128 * 108, 1024)
    weight, others = 2 * n * k, 2 * m * (n + k)
    assert weight + others < device.cache
    product = Operator("mm", "float16", 2 * m * n * k, weight + others, (m, n, k))
    moving = weight / (0.8 * 2039e9) + others / 2167e9
    assert kernel_seconds(product, device) == pytest.approx(moving + 2e-6)
    between = product._replace(name="bmm")
    assert kernel_seconds(between, device) < 0.95 * kernel_seconds(product, device)


def test_group_norms_read_their_maps_twice_and_compiled_ones_are_two_kernels() -> None:
    """What follows a norm joins its second kernel."""
    device = device_named("A100")
    norm = Operator("native_group_norm", "float16", 0, 10**9)
    moved, gap = 10**9 / (0.8 * 2039e9), 2e-6
    assert kernel_seconds(norm, device) == pytest.approx(1.5 * moved + 3 * gap)
    silu = Operator("silu", "float16", 0, 10**9 - 8)
    compiled = list(fused((norm, silu)))
    assert len(compiled) == 2
    assert sum(kernel_seconds(each, device, COMPILED) for each in compiled) == pytest.approx(1.5 * moved + 2 * gap)


def test_eager_convolutions_add_their_bias_apart() -> None:
    """And change layouts in three kernels more, unless maps have that of the kernel."""
    device, dims = device_named("A100"), (2**14, 320, 2880)
    maps = 2 * 2 * 2**14 * 320
    eager = Operator("convolution", "float16", 2 * 2**14 * 320 * 2880, maps, dims)
    in_layout, compiled = (replace(each, channels_last=True) for each in (ASSUMED, COMPILED))
    bias = kernel_seconds(eager, device, in_layout) - kernel_seconds(eager, device, compiled)
    assert bias == pytest.approx(maps / 2167e9 + 2e-6)
    layouts = kernel_seconds(eager, device) - kernel_seconds(eager, device, in_layout)
    assert layouts > 3 * 2e-6


def test_a_cache_is_no_faster_for_a_faster_memory() -> None:
    """That of an H200 is the H100's; Ada's large caches are many times as fast as its memory."""
    cached = Operator("add", "float16", 0, 4 * 10**7)
    seconds = {name: kernel_seconds(cached, device_named(name)) for name in ("H100", "H200", "L40", "RTX4090")}
    assert seconds["H200"] == seconds["H100"]
    for name in ("L40", "RTX4090"):
        beyond = kernel_seconds(cached._replace(num_bytes=100 * cached.num_bytes), device_named(name))
        assert beyond > 4 * 100 * (seconds[name] - ASSUMED.gap)


@pytest.mark.parametrize(("device", "faster"), [("A100", 156 / 19.5), ("H100", 494.5 / 66.9), ("MI300X", 1.0)])
def test_convolutions_in_fp32_have_the_rate_of_tf32_and_products_have_not(device: str, faster: float) -> None:
    """As torch has it without being told otherwise: a VAE that is decoded in fp32 is convolutions."""
    dims, spec = (2**16, 512, 4608), device_named(device)
    convolution = Operator("convolution", "float32", 2 * 2**16 * 512 * 4608, 8, dims)
    in_layout = replace(ASSUMED, channels_last=True, fused=True, gap=0.0)
    fraction = ASSUMED.convolution_fraction * spec.matmul_fraction
    rate = fraction * spec.flops["float32"]
    computing = product_seconds(convolution.flops, dims, processors(spec.processors, rate))
    assert kernel_seconds(convolution, spec, in_layout) == pytest.approx(computing / faster)
    product = convolution._replace(name="mm")
    assert kernel_seconds(product, spec, in_layout) == pytest.approx(computing * ASSUMED.convolution_fraction)


def test_every_device_has_a_source() -> None:
    for device in DEVICES:
        assert device.source.startswith("https://")
        assert device.flops["float16"] > device.flops["float32"] > 0
        assert device.cache_rate > ASSUMED.memory_fraction * device.memory_rate


@pytest.mark.parametrize("cards", [2, 6])
def test_cards_of_different_hosts_share_no_memory(cards: int) -> None:
    """Roots are counted within each host, also where a host has no multiple of four cards."""
    path = Machine.parse(f"2x({cards}xRTX4090-pcie4)-eth100").topology().path
    first, last = ({each.name for each in path(a, a + 1).resources} for a in (cards - 2, cards))
    assert first.isdisjoint(last)
    alone = Machine.parse(f"{cards}xRTX4090-pcie4").topology().path(0, 1)
    assert [each.rate for each in path(cards, cards + 1).resources] == [each.rate for each in alone.resources]
