"""What stands in for torch's functions in a band gives our rows of what they give for the whole image."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.errors import UnsupportedModel
from patchpar.plan.bands import split_bands
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.vae import attention
from patchpar.shard.vae.band import NOTHING, NeighbourRows, VaeBand
from patchpar.shard.vae.functions import BandFunctions
from patchpar.shard.vae.split import SplitMethod, VaeCall, random_numbers_kept
from tests.unit.threads import on_threads

from .autoencoders import axis_of, build, given, raised, structured

ROWS, WORLD = 11, 3
RELATIVE = 1e-6


def on_bands(function: Callable[[VaeBand], Any], *, rows: int = ROWS, world: int = WORLD) -> list[Any]:
    """What `function(band)` gives on each rank, with torch's functions replaced."""

    def run(transport: Transport) -> Any:
        part = LocalPatch(Communicator(transport), axis_of(transport, world), bands=split_bands(rows, world, 1))
        band = VaeBand(part)
        with torch.no_grad(), BandFunctions(band):
            return function(band)

    return raised(on_threads(world, run))


def rows_of(band: VaeBand, x: Tensor, scale: int = 1) -> Tensor:
    bands, group_rank = band.patch.bands, band.patch.group_rank
    return x.narrow(-2, scale * bands.starts[group_rank], scale * bands.size(group_rank)).contiguous()


def close(got: list[Tensor], want: Tensor) -> bool:
    whole = torch.cat(got, -2)
    return whole.shape == want.shape and bool((whole - want).norm() <= RELATIVE * want.norm())


CONVOLUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: F.conv2d(x, weight(3), padding=1),
    "5 rows": lambda x: F.conv2d(x, weight(5), padding=2),
    "no rows": lambda x: F.conv2d(x, weight(1)),
    "padded before": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), weight(3)),
    "copies of the edge": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), weight(3)),
    "reflected": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), weight(3)),
    "reshaped in between": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)).clone(), weight(3)),
    "padded and not convolved": lambda x: F.pad(x, (0, 0, 1, 1))[..., 2:, :] * 2,
    "padded and given by name": lambda x: torch.mul(input=F.pad(x, (0, 0, 1, 1)), other=2)[..., 2:, :],
    "after a norm": lambda x: F.conv2d(F.silu(F.group_norm(x, 2)), weight(3), padding=1),
    "after a norm, padded before": lambda x: F.conv2d(F.pad(F.silu(F.group_norm(x, 2)), (1, 1, 1, 1)), weight(3)),
    "after a norm, 5 rows": lambda x: F.conv2d(F.group_norm(x, 2), weight(5), padding=2),
    "upsampled": lambda x: F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), weight(3), padding=1),
}


def weight(size: int) -> Tensor:
    """Not random, since noise of a band is cut out of the whole image's."""
    return torch.linspace(-3, 3, 16 * size * size).sin().reshape(4, 4, size, size)


@pytest.mark.parametrize("function", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_convolutions(function: Callable[[Tensor], Tensor]) -> None:
    x = structured(2, 4, ROWS, 5)
    assert close(on_bands(lambda band: function(rows_of(band, x))), function(x))


@pytest.mark.parametrize("pad", [(0, 1, 0, 1), (1, 1, 1, 1)])
def test_a_stride_reads_only_below(pad: tuple[int, int, int, int]) -> None:
    """The encoders' asymmetric padding needs the neighbour below, symmetric padding that above."""

    def halved(x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, pad), weight(3), stride=2)

    x = structured(1, 4, 2 * ROWS, 6)
    assert close(on_bands(lambda band: halved(rows_of(band, x, 2))), halved(x))


@pytest.mark.parametrize("rows", [WORLD, ROWS])
@pytest.mark.parametrize("pad", [(0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1)])
def test_a_stride_after_a_norm_reads_no_more_rows_than_are_padded(pad: tuple[int, int, int, int], rows: int) -> None:
    """The norm brings a row of each neighbour, of which the padding may need one only; bands may be thin."""

    def halved(x: Tensor) -> Tensor:
        return F.conv2d(F.pad(F.silu(F.group_norm(x, 2)), pad), weight(3), stride=2)

    x = structured(1, 4, 2 * rows, 6)
    assert close(on_bands(lambda band: halved(rows_of(band, x, 2)), rows=rows), halved(x))


def test_rows_padded_twice_are_refused() -> None:
    x = structured(1, 4, ROWS, 5)
    with pytest.raises(UnsupportedModel, match="padded twice"):
        on_bands(lambda band: F.conv2d(F.pad(rows_of(band, x), (1, 1, 1, 1)), weight(3), padding=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_taken_in_slices(dtype: torch.dtype) -> None:
    """Far from zero, where the squares of half precision would be lost."""
    x = (structured(2, 32, ROWS, 5) + 20).to(dtype)
    affine = [torch.linspace(0.5, 1.5, 32, dtype=dtype)] * 2
    got = torch.cat(on_bands(lambda band: F.group_norm(rows_of(band, x), 16, *affine)), -2)
    want = F.group_norm(x.float(), 16, *(each.float() for each in affine))
    assert got.dtype == dtype
    assert (got.float() - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()


def test_noise_is_that_of_the_whole_image() -> None:
    def noise(rows: int) -> Tensor:
        return torch.randn((rows, 5), generator=torch.Generator().manual_seed(3))

    found = on_bands(lambda band: noise(2 * band.patch.bands.size(band.patch.group_rank)))
    assert torch.equal(torch.cat(found), noise(2 * ROWS))


def test_only_a_division_that_changes_nothing_is_left_out() -> None:
    x = torch.linspace(-2, 2, 4)

    def divided(band: VaeBand) -> tuple[bool, Tensor]:
        return (x / 1) is x, torch.div(x, 1, rounding_mode="floor")

    for is_left_out, floor in on_bands(divided):
        assert is_left_out
        assert torch.equal(floor, x.floor())


def test_random_numbers_of_a_comparison_are_kept() -> None:
    """Of a generator too that is not passed by name."""
    by_position, by_name = (torch.Generator().manual_seed(seed) for seed in (1, 2))
    before = [torch.get_rng_state(), by_position.get_state(), by_name.get_state()]
    with random_numbers_kept(VaeCall(len, torch.zeros(1), (True, by_position), {"generator": by_name})):
        for generator in (None, by_position, by_name):
            torch.rand(3, generator=generator)
    after = [torch.get_rng_state(), by_position.get_state(), by_name.get_state()]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


def test_the_activation_after_a_norm_takes_no_memory() -> None:
    def addresses(band: VaeBand) -> tuple[bool, bool]:
        x = rows_of(band, structured(1, 4, ROWS, 5))
        y = F.group_norm(x, 2)
        return F.silu(y).data_ptr() == y.data_ptr(), F.silu(x).data_ptr() == x.data_ptr()

    assert on_bands(addresses) == [(True, False)] * WORLD


def test_division_by_one_is_none() -> None:
    def same(band: VaeBand) -> tuple[bool, bool, bool]:
        x = rows_of(band, structured(1, 4, ROWS, 5))
        return x / 1.0 is x, x / 2.0 is x, torch.equal(x / 2.0, x * 0.5)

    assert on_bands(same) == [(True, False, True)] * WORLD


@pytest.mark.parametrize("heads", [(), (1,), (2,)], ids=str)
def test_attention_is_over_the_tokens_of_all(heads: tuple[int, ...]) -> None:
    q, k, v = (structured(2, *heads, ROWS, 8, seed=seed) for seed in range(3))
    got = on_bands(lambda band: F.scaled_dot_product_attention(*(rows_of(band, x) for x in (q, k, v))))
    assert close(got, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(
    ("most", "chunks"),
    [(2 * 2 * 4 * ROWS * 8, 1), (2 * 2 * 3 * ROWS * 8, 2), (2 * 2 * 2 * ROWS * 8, 2), (1, 3)],
    ids=["one", "one for 3 rows, not 4", "two", "a row each"],
)
def test_attention_in_chunks_is_the_same(most: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many on every rank, whether it has 3 or 4 rows, and a mark for each: a rank must show that it gets on."""
    monkeypatch.setitem(attention.MOST_PRODUCTS, "cpu", most)
    marks: dict[int, list[str]] = {group_rank: [] for group_rank in range(WORLD)}
    q, k, v = (structured(2, 2, ROWS, 8, seed=seed) for seed in range(3))

    def attended(band: VaeBand) -> Tensor:
        band.where, band.patch.comm._beat = "mid_block", marks[band.patch.group_rank].append
        return F.scaled_dot_product_attention(*(rows_of(band, x) for x in (q, k, v)))

    assert close(on_bands(attended), F.scaled_dot_product_attention(q, k, v))
    exchanges_and_chunks = 1 + (chunks if chunks > 1 else 0)
    assert marks == dict.fromkeys(range(WORLD), ["mid_block"] * exchanges_and_chunks)


def test_attention_that_does_not_grow_with_the_rows_is_refused() -> None:
    x = structured(1, 1, 7, 8)
    with pytest.raises(UnsupportedModel, match="7 tokens, which do not grow with the rows"):
        on_bands(lambda band: F.scaled_dot_product_attention(x, x, x), rows=5, world=2)


def test_a_mask_that_is_not_of_frames_is_refused() -> None:
    def masked(band: VaeBand) -> Tensor:
        x = rows_of(band, structured(1, 1, ROWS, 8))
        mask = torch.ones(x.shape[2], x.shape[2]).tril().bool()
        mask[0] = False
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    with pytest.raises(UnsupportedModel, match="not causal over frames"):
        on_bands(masked)


def test_edge_rows_of_a_norm_travel_only_where_they_are_of_use() -> None:
    """CogVideoX scales its norms by the latent before it convolves: at first nobody knows."""
    x, kwargs = given("AutoencoderKLCogVideoX", "decode", 5, 4)

    def sent(transport: Transport) -> list[int]:
        vae, comm = build("AutoencoderKLCogVideoX"), Communicator(transport)
        split = SplitMethod(vae, "decode", (comm, axis_of(transport, 2)), None)
        found = []
        for _ in range(2):
            comm.traffic.clear()
            with torch.no_grad():
                split(VaeCall(vae.decode, x, (), kwargs), everywhere=True)
            found.append(comm.traffic.bytes_sent["halo"])
        return found

    for first, second in raised(on_threads(2, sent)):
        assert 0 < second < first


def test_edge_rows_of_the_last_norm_of_a_run_are_of_no_use() -> None:
    band, x = VaeBand(cast("LocalPatch", None)), torch.zeros(1)
    for norm in ("first", "last"):
        band.leave(NeighbourRows(weakref.ref(x), lambda: NOTHING, norm=norm))
    assert band.feeds == {"first": False}
    band.finish()
    assert band.feeds == {"first": False, "last": False}


def test_modules_are_named_where_something_is_wrong() -> None:
    vae = build("AutoencoderKL")
    vae.decoder.conv_in = nn.Sequential(nn.ZeroPad2d(1), vae.decoder.conv_in)

    def run(transport: Transport) -> Any:
        split = SplitMethod(vae, "decode", (Communicator(transport), axis_of(transport, 1)), None)
        with torch.no_grad():
            return split(VaeCall(vae.decode, structured(1, 4, 4, 4), (), {}), everywhere=True)

    with pytest.raises(UnsupportedModel, match=r"decoder\.conv_in\.1: rows are padded twice"):
        raised(on_threads(1, run))


def test_the_ratio_of_sizes_is_found_without_a_random_number() -> None:
    """Or the noise of an image to image call would be another than on one device."""

    def run(transport: Transport) -> bool:
        generator = torch.Generator().manual_seed(3)

        def encode(x: Tensor, generator: torch.Generator) -> Tensor:
            return F.avg_pool2d(x, 8) + torch.randn((), generator=generator) + torch.randn(())

        method = SplitMethod(nn.Identity(), "encode", (Communicator(transport), axis_of(transport, 1)), None)
        before = torch.get_rng_state(), generator.get_state()
        assert method.takes(VaeCall(encode, torch.zeros(1, 3, 64, 48), (), {"generator": generator}))
        return all(map(torch.equal, before, (torch.get_rng_state(), generator.get_state())))

    assert raised(on_threads(1, run)) == [True]
