"""A VAE under each way of running it: who computes, who gets the result, what is said, and nothing left behind."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.pipeline.startup import way_and_network
from patchpar.plan.mesh import Mesh
from patchpar.shard.vae.modes import MODES, check_mode
from patchpar.shard.vae.parallel import OutputNeeded, ParallelVaes, VaeCallState
from patchpar.shard.verification_cache import VerificationCache
from tests.tensors import psnr_db
from tests.unit.threads import on_threads

from .autoencoders import axis_of, build, given, plain, raised

NAME, SIZE, WORLD = "AutoencoderKL", (6, 5), 2


def on_ranks(
    way: str,
    function: Callable[[ParallelVaes, Any], Any],
    *,
    vae: Callable[[], Any] = lambda: build(NAME),
    folder: Path | None = None,
) -> list[Any]:
    """What `function(vaes, vae)` gives on each rank, inside a call of the pipeline."""

    def run(transport: Transport) -> Any:
        own = vae()
        denoiser = nn.Identity()
        verifications = None if folder is None else VerificationCache(folder / str(transport.rank))
        mesh = (Communicator(transport), axis_of(transport, WORLD))
        vaes = ParallelVaes({"vae": own, "unet": denoiser, "tokenizer": None}, [denoiser], way, mesh, verifications)
        with torch.no_grad(), vaes.state.open():
            return function(vaes, own)

    return raised(on_threads(WORLD, run))


def decode(vaes: ParallelVaes, vae: Any) -> Tensor:
    return vae.decode(given(NAME, "decode", *SIZE)[0]).sample


def twice(vaes: ParallelVaes, vae: Any) -> Tensor:
    decode(vaes, vae)
    return decode(vaes, vae)


def encode(vaes: ParallelVaes, vae: Any) -> Tensor:
    return vae.encode(given(NAME, "encode", *SIZE)[0]).latent_dist.parameters


def wanted(method: str) -> Tensor:
    return plain(build(NAME), method, *given(NAME, method, *SIZE))


@pytest.mark.parametrize("way", ["auto", "exact"])
def test_bands(way: str) -> None:
    first, other = on_ranks(way, decode)
    assert psnr_db(first, wanted("decode")) >= 100
    assert other.shape == first.shape
    assert not other.any()
    for found in on_ranks(way, encode):
        assert psnr_db(found, wanted("encode")) >= 100


def test_one_rank_alone() -> None:
    first, other = on_ranks("rank0", decode)
    assert torch.equal(first, wanted("decode"))
    assert other.shape == first.shape
    assert not other.any()
    for found in on_ranks("rank0", encode):
        assert torch.equal(found, wanted("encode"))


@pytest.mark.parametrize("name", ["AutoencoderKLWan", "AutoencoderKLTemporalDecoder"])
def test_who_stands_aside_gives_the_same_shape(name: str) -> None:
    x, kwargs = given(name, "decode", *SIZE)
    found = on_ranks("rank0", lambda vaes, vae: vae.decode(x, **kwargs, return_dict=False), vae=lambda: build(name))
    assert [type(each) for each in found] == [tuple, tuple]
    assert found[0][0].shape == found[1][0].shape


def test_tiles() -> None:
    def small_tiles() -> Any:
        vae = build(NAME)
        vae.tile_sample_min_size, vae.tile_latent_min_size = 32, 4
        return vae

    alone = small_tiles()
    alone.enable_tiling()
    want = plain(alone, "decode", *given(NAME, "decode", *SIZE))
    first, other = on_ranks("tiled", decode, vae=small_tiles)
    assert torch.equal(first, want)
    assert not torch.equal(first, wanted("decode"))
    assert other.shape == first.shape
    assert on_ranks("tiled", lambda vaes, vae: (decode(vaes, vae), vae.use_tiling)[1]) == [False] * WORLD


def test_tiles_on_one_rank() -> None:
    def tiled(transport: Transport) -> tuple[Tensor, Tensor]:
        vae, denoiser = build(NAME), nn.Identity()
        vae.tile_sample_min_size, vae.tile_latent_min_size = 32, 4
        vaes = ParallelVaes(
            {"vae": vae, "vqvae": vae}, [denoiser], "tiled", (Communicator(transport), axis_of(transport, 1))
        )
        with torch.no_grad(), vaes.state.open():
            got = decode(vaes, vae)
            denoiser(torch.ones(1))  # this rank has what it has decoded
        vaes.restore()
        assert "decode" not in vae.__dict__
        return got, plain(vae, "decode", given(NAME, "decode", *SIZE)[0], {})

    ((got, after),) = raised(on_threads(1, tiled))
    assert not torch.equal(got, wanted("decode"))
    assert torch.equal(after, wanted("decode"))


def test_tiling_that_is_switched_on_wins_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def tiled(vaes: ParallelVaes, vae: Any) -> Tensor:
        vae.enable_tiling()
        decode(vaes, vae)
        return decode(vaes, vae)

    with caplog.at_level(logging.WARNING, "patchpar"):
        first, other = on_ranks("auto", tiled)
    assert torch.equal(first, wanted("decode"))  # smaller than a tile
    assert not other.any()
    assert [record.message for record in caplog.records] == [
        "AutoencoderKL has tiling switched on, so one rank decodes, tile by tile"
    ]


def test_slices_of_a_batch() -> None:
    z = torch.cat([given(NAME, "decode", *SIZE)[0]] * 2)

    def sliced(vaes: ParallelVaes, vae: Any) -> Tensor:
        vae.enable_slicing()
        return vae.decode(z).sample

    assert psnr_db(on_ranks("exact", sliced)[0], plain(build(NAME), "decode", z, {})) >= 100


def test_an_image_of_fewer_rows_than_ranks_is_decoded_whole() -> None:
    z = given(NAME, "decode", 1, 1)[0]
    for found in on_ranks("exact", lambda vaes, vae: vae.decode(z).sample):
        assert torch.equal(found, plain(build(NAME), "decode", z, {}))


@pytest.mark.parametrize("way", ["exact", "rank0"])
def test_a_pipeline_that_goes_on_gets_the_image_on_all_ranks(way: str) -> None:
    def goes_on(vaes: ParallelVaes, vae: Any) -> tuple[bool, Tensor]:
        decode(vaes, vae)
        decode(vaes, vae)  # one image after the other is no sign of it
        try:
            encode(vaes, vae)
        except OutputNeeded:
            vaes.state.everywhere = True
        with vaes.state.open():
            found = decode(vaes, vae)
            vaes.state.go_on()
        return vaes.state.everywhere, found

    for needed, found in on_ranks(way, goes_on):
        assert needed
        assert psnr_db(found, wanted("decode")) >= 100


@pytest.mark.parametrize("way", ["exact", "rank0"])
def test_a_call_with_a_callback_has_it_there_from_the_beginning(way: str) -> None:
    def goes_on(vaes: ParallelVaes, vae: Any) -> tuple[bool, Tensor]:
        with vaes.state.open(watched=True):
            found = decode(vaes, vae)
            encode(vaes, vae)
        return vaes.state.everywhere, found

    for after, found in on_ranks(way, goes_on):
        assert not after
        assert psnr_db(found, wanted("decode")) >= 100


def test_the_denoiser_is_watched() -> None:
    def generates_again(vaes: ParallelVaes, vae: Any) -> None:
        denoiser = nn.Identity()
        watching = ParallelVaes({}, [denoiser], "exact", (vaes.comm, vaes.vaes[0].split["decode"].axis))
        with watching.state.open():
            denoiser(torch.ones(1))
            watching.state.dropped = True
            with pytest.raises(OutputNeeded):
                denoiser(torch.ones(1))
        denoiser(torch.ones(1))  # the next image
        watching.restore()

    on_ranks("exact", generates_again)


def test_an_image_that_is_decoded_for_others_is_not_needed_on_all_ranks() -> None:
    state = VaeCallState()
    with state.open():
        with state.aside():
            state.dropped = True
        state.go_on()
        state.dropped = True
        with pytest.raises(OutputNeeded):
            state.go_on()


def test_outside_a_call_every_rank_has_its_own_vae() -> None:
    """A callback of the caller's runs on one rank alone: it must not wait for others."""

    def alone(vaes: ParallelVaes, vae: Any) -> Tensor:
        with vaes.state.interrupted():
            return decode(vaes, vae)

    for found in on_ranks("exact", alone):
        assert torch.equal(found, wanted("decode"))


def test_nothing_stays_behind() -> None:
    def restored(vaes: ParallelVaes, vae: Any) -> tuple[Any, Tensor]:
        decode(vaes, vae)
        vaes.restore()
        hooks = [module for module in vae.modules() if module._forward_pre_hooks]
        return (hooks, sorted(set(vae.__dict__) - set(build(NAME).__dict__))), decode(vaes, vae)

    for left, found in on_ranks("exact", restored):
        assert left == ([], [])
        assert torch.equal(found, wanted("decode"))


class Squeezing(nn.Module):
    """Mixes positions in a way that no band knows: it looks at the mean of all."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae
        self.config = vae.config

    def encode(self, x: Tensor) -> Any:
        return self.vae.encode(x)

    def decode(self, z: Tensor) -> Any:
        return self.vae.decode(z - z.mean((-2, -1), keepdim=True))


def test_what_does_not_verify_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"Squeezing\.decode in 2 bands differs .* use vae='rank0'"):
        on_ranks("exact", decode, vae=lambda: Squeezing(build(NAME)), folder=tmp_path)


def test_or_runs_whole_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "patchpar"):
        first, other = on_ranks("auto", decode, vae=lambda: Squeezing(build(NAME)), folder=tmp_path)
    assert torch.equal(first, Squeezing(build(NAME)).decode(given(NAME, "decode", *SIZE)[0]).sample)
    assert not other.any()
    (record,) = caplog.records
    assert "one rank runs Squeezing whole, because it cannot be split" in record.message
    with caplog.at_level(logging.WARNING, "patchpar"):
        caplog.clear()
        on_ranks("auto", twice, vae=lambda: Squeezing(build(NAME)), folder=tmp_path)
    assert len(caplog.records) == 1, "from now on, without another comparison"


def test_a_verification_is_kept(tmp_path: Path) -> None:
    def error(vaes: ParallelVaes, vae: Any) -> float | None:
        decode(vaes, vae)
        return vaes.vaes[0].split["decode"].error

    first, second = (on_ranks("exact", error, folder=tmp_path) for _ in range(2))
    assert first == second
    assert 0 < first[0] < 1e-5
    assert len(list(tmp_path.rglob("*.json"))) == WORLD


def test_it_is_verified_again_for_another_dtype_and_after_a_change(tmp_path: Path) -> None:
    """A comparison in single precision says nothing of half precision, nor one of modules that are replaced."""

    def compared(vaes: ParallelVaes, vae: Any) -> list[int]:
        calls, split = list[int](), vaes.vaes[0].split["decode"]
        plain_error, latent = split._error, given(NAME, "decode", *SIZE)[0]

        def counted(call: Any) -> float:
            calls.append(1)
            return plain_error(call)

        split._error, found = counted, []  # type: ignore[method-assign]
        for change in (lambda: None, lambda: None, lambda: vae.to(torch.bfloat16)):
            change()
            vae.decode(latent.to(vae.dtype))
            found.append(len(calls))
        vae.decoder.conv_out = nn.Sequential(vae.decoder.conv_out)
        vaes.forget()
        assert not split.feeds
        vae.decode(latent.to(vae.dtype))
        return [*found, len(calls)]

    for found in on_ranks("exact", compared, folder=tmp_path):
        assert found == [2, 2, 4, 6], "two sizes each time"


class Paired(Squeezing):
    """Takes the mean of pairs of rows, which are whole only in bands of even numbers of rows."""

    def decode(self, z: Tensor) -> Any:
        rows = z.shape[-2] // 2 * 2
        pairs = z[..., :rows, :].unflatten(-2, (-1, 2)).mean(-2, keepdim=True).expand(*z.shape[:-2], -1, 2, -1)
        return self.vae.decode(torch.cat([pairs.flatten(-3, -2), z[..., rows:, :]], -2))


def test_one_that_is_right_in_even_bands_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"Paired\.decode in 2 bands differs .* use vae='rank0'"):
        on_ranks("exact", decode, vae=lambda: Paired(build(NAME)), folder=tmp_path)


class Fixed(Squeezing):
    """Encodes images of one size only."""

    def encode(self, x: Tensor) -> Any:
        return self.vae.encode(x + torch.zeros(8 * SIZE[0], 8 * SIZE[1]))


def test_one_that_takes_no_small_image_runs_whole(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"Fixed\.encode does not .* small .* use vae='rank0'"):
        on_ranks("exact", encode, vae=lambda: Fixed(build(NAME)), folder=tmp_path)
    for found in on_ranks("auto", encode, vae=lambda: Fixed(build(NAME)), folder=tmp_path):
        assert torch.equal(found, wanted("encode"))


class Large(Squeezing):
    """Encodes images from 72 x 72 pixels on."""

    def encode(self, x: Tensor) -> Any:
        if min(x.shape[-2:]) < 72:
            raise ValueError(f"{tuple(x.shape[-2:])} is less than a window")
        return self.vae.encode(x)


def test_one_that_encodes_no_corner_runs_whole(tmp_path: Path) -> None:
    image = given(NAME, "encode", 10, 9)[0]

    def encoded(_: ParallelVaes, vae: Any) -> Tensor:
        return vae.encode(image).latent_dist.parameters

    words = r"Large\.encode fails with an image of 64 x 64 pixels \(\(64, 64\) is less than a window\).*use vae='rank0'"
    with pytest.raises(UnsupportedModel, match=words):
        on_ranks("exact", encoded, vae=lambda: Large(build(NAME)), folder=tmp_path)
    for found in on_ranks("auto", encoded, vae=lambda: Large(build(NAME)), folder=tmp_path):
        assert torch.equal(found, plain(build(NAME), "encode", image, {}))


class OneSize(Squeezing):
    """Decodes images of one size only, as AutoencoderRAE does, whose decoder is a ViT."""

    def decode(self, z: Tensor) -> Any:
        if z.shape[-2:] != SIZE:
            raise ValueError(f"{z.shape[-2] * z.shape[-1]} patches are not {SIZE}")
        return self.vae.decode(z)


@pytest.mark.parametrize("way", ["auto", "rank0"])
def test_one_that_decodes_no_corner_is_decoded_by_all(way: str, tmp_path: Path) -> None:
    first, other = on_ranks(way, decode, vae=lambda: OneSize(build(NAME)), folder=tmp_path)
    assert torch.equal(first, wanted("decode"))
    assert other.shape == first.shape


def test_a_mask_beside_the_latent_is_decoded_by_all(tmp_path: Path) -> None:
    """It is as large as the image, and fits no corner."""
    name = "AsymmetricAutoencoderKL"
    (z, _), (image, _) = given(name, "decode", *SIZE), given(name, "encode", *SIZE)
    beside = {"image": image, "mask": (image[:, :1] > 0).float()}
    want = plain(build(name), "decode", z, beside)
    vae = partial(build, name)
    first, other = on_ranks("auto", lambda _, own: own.decode(z, **beside).sample, vae=vae, folder=tmp_path)
    assert torch.equal(first, want)
    assert other.shape == want.shape
    assert not torch.equal(want, plain(build(name), "decode", z, {}))


@pytest.mark.parametrize("name", ["AutoencoderKLTemporalDecoder", "AsymmetricAutoencoderKL"])
def test_tiles_of_one_that_has_none_are_refused(name: str) -> None:
    """diffusers gives it the method all the same, which raises."""
    x, kwargs = given(name, "decode", *SIZE)
    with pytest.raises(UnsupportedModel, match=f"{name} cannot run in tiles: use vae='rank0' or vae='exact'"):
        on_ranks("tiled", lambda vaes, vae: vae.decode(x, **kwargs), vae=lambda: build(name))


class Full(Squeezing):
    """Lacks memory for a small image, too."""

    def decode(self, z: Tensor) -> Any:
        raise torch.OutOfMemoryError("full")


def test_too_little_memory_is_no_reason_to_run_whole(tmp_path: Path) -> None:
    """Another rank may have enough, and would wait in bands. The caller makes such a job again elsewhere."""
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        on_ranks("auto", decode, vae=lambda: Full(build(NAME)), folder=tmp_path)


class Smoothed(Squeezing):
    """Reads `reach` rows of the bands beside this one."""

    reach = 2

    def decode(self, z: Tensor) -> Any:
        kernel = torch.ones(z.shape[1], 1, 2 * self.reach + 1, 1) / (2 * self.reach + 1)
        return self.vae.decode(nn.functional.conv2d(z, kernel, padding=(self.reach, 0), groups=z.shape[1]))


class SmoothedFar(Smoothed):
    reach = 3


def test_bands_too_thin_for_a_convolution_are_decoded_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """That depends on the image: a larger one is decoded in bands again."""
    thin = given(NAME, "decode", 2, 2)[0]

    def both(vaes: ParallelVaes, vae: Any) -> tuple[Tensor, Tensor, str]:
        return vae.decode(thin).sample, decode(vaes, vae), vaes.vaes[0].mode

    with caplog.at_level(logging.WARNING, "patchpar"):
        (small, large, mode), (other, _, _) = on_ranks("auto", both, vae=lambda: Smoothed(build(NAME)), folder=tmp_path)
    assert torch.equal(small, Smoothed(build(NAME)).decode(thin).sample)
    assert not other.any()
    assert psnr_db(large, Smoothed(build(NAME)).decode(given(NAME, "decode", *SIZE)[0]).sample) >= 100
    assert mode == "auto"
    (record,) = caplog.records
    assert re.search(r"one rank runs Smoothed whole.*reads 2 rows of its neighbours", record.message)
    with pytest.raises(PlanError, match=r"reads 2 rows of its neighbours.*use vae='rank0'"):
        on_ranks("exact", both, vae=lambda: Smoothed(build(NAME)), folder=tmp_path)


def test_one_that_reads_farther_than_it_is_verified_runs_whole(tmp_path: Path) -> None:
    first, _ = on_ranks("auto", decode, vae=lambda: SmoothedFar(build(NAME)), folder=tmp_path)
    assert torch.equal(first, SmoothedFar(build(NAME)).decode(given(NAME, "decode", *SIZE)[0]).sample)
    with pytest.raises(UnsupportedModel, match=r"SmoothedFar\.decode does not run in bands at a small size .*3 rows"):
        on_ranks("exact", decode, vae=lambda: SmoothedFar(build(NAME)), folder=tmp_path)


def test_compiled_blocks_are_refused() -> None:
    def compiled() -> Any:
        vae = build(NAME)
        vae.decoder.mid_block._compiled_call_impl = vae.decoder.mid_block._call_impl  # what compile() sets
        return vae

    with pytest.raises(UnsupportedModel, match=r"compiled blocks.*use vae='rank0'"):
        on_ranks("exact", decode, vae=compiled)


@pytest.mark.parametrize("wrong", ["all", 3, None, ""])
def test_modes_have_names(wrong: object) -> None:
    with pytest.raises(PlanError, match=", ".join(MODES)):
        check_mode(wrong)


def test_a_network_is_no_way() -> None:
    """`vae=` of from_pretrained is diffusers' own where it is a network."""
    network = nn.Identity()
    assert way_and_network("tiled", {"variant": "fp16"}) == ("tiled", {"variant": "fp16"})
    assert way_and_network(network, {"variant": "fp16"}) == ("auto", {"variant": "fp16", "vae": network})


def test_the_command_line_names_what_is_valid() -> None:
    result = CliRunner().invoke(app, ["generate", "a house", "--vae", "all"])
    assert result.exit_code == 2
    assert "vae='all': use auto, exact, tiled, rank0" in " ".join(result.stderr.replace("│", " ").split())


def test_the_ranks_of_one_image_decode_it() -> None:
    """With several images at once, each is of other ranks."""
    axis = Mesh(5, range(8), data=2, cfg=2, patch=2).of_one_image()
    assert (axis.rank, axis.size, axis.ranks) == (1, 4, (4, 5, 6, 7))
