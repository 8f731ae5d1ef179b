"""What the ranks of `benchmarks.vae` run: one method of a VAE, plain and in bands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor

from patchpar.plan.mesh import Axis
from patchpar.shard.vae.outputs import tensors_of
from patchpar.shard.vae.split import SplitMethod, VaeCall
from tests.ranks import PoolRank
from tests.tensors import psnr_db
from tests.vae.allocations import Allocations
from tests.vae.autoencoders import build, given, structured


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """One rank: PSNR against the plain method and of every band alone, traffic."""

    psnr_db: float
    alone_db: float
    bytes_sent: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One rank, seconds of each turn: by the clock and of this rank's processor."""

    plain: list[float]
    split: list[float]
    plain_processor: list[float]
    split_processor: list[float]
    waited: list[float]


def accuracy(this: PoolRank, name: str, method: str, size: tuple[int, int]) -> Accuracy:
    """Of one class of VAE, on a latent of that size or the image of one."""
    vae, (x, kwargs) = build(name), given(name, method, *size)
    call = VaeCall(getattr(vae, method), x, (), kwargs)
    split = _split(this, vae, method)
    with torch.no_grad():
        split.takes(call)
        want = tensors_of(call.on(x))[0]
        split.comm.traffic.clear()
        got = tensors_of(split(call, everywhere=True))[0]
        traffic = split.comm.traffic
        sent, rounds = traffic.total_bytes, sum(traffic.rounds.values())
        split.exchanging = False
        alone = tensors_of(split(call, everywhere=True))[0]
    return Accuracy(
        psnr_db=psnr_db(got, want),
        alone_db=psnr_db(alone, want),
        bytes_sent=sent,
        rounds=rounds,
    )


def _sdxl(*widths: int) -> Any:
    """SDXL's VAE with all its layers and other widths."""
    return diffusers.AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )


def _wan() -> Any:
    """A third as wide as Wan 2.1's."""
    return diffusers.AutoencoderKLWan(base_dim=32)


def _hunyuan() -> Any:
    """A quarter as wide as HunyuanVideo's."""
    return diffusers.AutoencoderKLHunyuanVideo(block_out_channels=(32, 64, 128, 128))


def _cogvideox() -> Any:
    """A quarter as wide as CogVideoX's."""
    return diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(32, 64, 64, 128),
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        layers_per_block=2,
    )


PEAKS: dict[str, tuple[Callable[[], Any], tuple[int, ...], tuple[int, ...]]] = {
    "AutoencoderKL": (partial(_sdxl, 32, 64, 128, 128), (1, 4), (1, 3)),
    "AutoencoderKLWan": (_wan, (1, 16, 2), (1, 3, 5)),
    "AutoencoderKLHunyuanVideo": (_hunyuan, (1, 16, 2), (1, 3, 5)),
    "AutoencoderKLCogVideoX": (_cogvideox, (1, 16, 2), (1, 3, 5)),
}
"""Builders, and shapes of a latent and an image: narrower than the real ones, but as much wider than their images'
three channels as lets those not count."""


def peak(this: PoolRank, name: str, method: str, size: tuple[int, int]) -> tuple[int, int]:
    """Bytes that the plain method allocates at most, and this rank in bands."""
    make, latent, image = PEAKS[name]
    vae: Any = make().eval()
    height, width = size
    x = structured(*latent, height, width) if method == "decode" else structured(*image, 8 * height, 8 * width)
    call, split = VaeCall(getattr(vae, method), x, (), {}), _split(this, vae, method)
    with torch.no_grad():
        split.takes(call)
        with Allocations() as plain:
            call.on(x)
        with Allocations() as own:
            split(call, everywhere=False)
    return plain.peak, own.peak


def times(this: PoolRank, widths: tuple[int, ...], method: str, pixels: int, turns: int) -> Times:
    """Of SDXL's VAE with other widths: plain on rank 0 alone, then in bands on all, in turns."""
    torch.manual_seed(0)
    vae: Any = _sdxl(*widths).eval()
    x = structured(1, 4, pixels // 8, pixels // 8) if method == "decode" else structured(1, 3, pixels, pixels)
    call, split = VaeCall(getattr(vae, method), x, (), {}), _split(this, vae, method)
    found = Times(plain=[], split=[], plain_processor=[], split_processor=[], waited=[])
    with torch.no_grad():
        split.takes(call)
        for turn in range(turns + 1):
            plain = _timed(lambda: call.on(x)) if this.rank == 0 else (0.0, 0.0)
            split.comm.transport.deadline = 600.0
            together(this, split)
            split.comm.traffic.clear()
            own = _timed(lambda: split(call, everywhere=False))
            if turn:  # the first warms up
                found.plain.append(plain[0])
                found.plain_processor.append(plain[1])
                found.split.append(own[0])
                found.split_processor.append(own[1])
                found.waited.append(sum(split.comm.traffic.seconds_waited.values()))
    return found


def together(this: PoolRank, split: SplitMethod) -> None:
    """Wait until all are here."""
    from patchpar.comm.collectives import AllGather

    AllGather(split.comm, split.axis, "begin", "begin").same(torch.zeros(1))


def _split(this: PoolRank, vae: Any, method: str) -> SplitMethod:
    axis = Axis("image", this.rank, this.world, tuple(range(this.world)))
    return SplitMethod(vae, method, (this.comm(), axis), None)


def _timed(function: Any) -> tuple[float, float]:
    start, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - processor


def tiled_db(name: str, size: tuple[int, int]) -> float | None:
    """PSNR of diffusers' own tiles against the plain decode, four tiles to a side; None where it has none."""
    vae, (z, kwargs) = build(name), given(name, "decode", *size)
    if not hasattr(vae, "tile_latent_min_size"):
        return None
    want: Tensor = vae.decode(z, **kwargs).sample
    vae.enable_tiling()
    vae.tile_latent_min_size = max(size) // 2
    vae.tile_sample_min_size = 8 * vae.tile_latent_min_size
    return psnr_db(vae.decode(z, **kwargs).sample, want)
