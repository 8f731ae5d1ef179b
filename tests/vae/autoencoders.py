"""Tiny VAEs of every class that is promised, images with structure for them, and how they run on ranks as threads.

White noise hides mistakes: its moments are alike in every band. An image's power falls with the frequency, and so does
that of the fields here.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.plan.mesh import Axis
from patchpar.shard.vae.outputs import tensors_of
from patchpar.shard.vae.split import SplitMethod, VaeCall
from tests.tiny import autoencoders
from tests.tiny.weights import enliven, seeded
from tests.unit.threads import on_threads

ONE_AT_A_TIME = threading.Lock()
SLOPE = 3.0  # power at frequency k falls as k ** -SLOPE


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How to build a VAE; shapes of a latent and of an image with [height, width] appended, and their scale."""

    build: Callable[[], nn.Module]
    latent: tuple[int, ...]
    image: tuple[int, ...] = (1, 3)
    scale: int = 8
    decode: Mapping[str, Any] = field(default_factory=dict)


def _temporal() -> nn.Module:
    """Two layers: only then is there attention in the middle."""
    return diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=2
    )


def _asymmetric() -> nn.Module:
    return diffusers.AsymmetricAutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        down_block_out_channels=(16, 32),
        up_block_types=("UpDecoderBlock2D",) * 2,
        up_block_out_channels=(16, 32),
        layers_per_down_block=1,
        layers_per_up_block=1,
        norm_num_groups=8,
    )


def _tiny() -> nn.Module:
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
        num_encoder_blocks=(1,) * 4,
        num_decoder_blocks=(1,) * 4,
    )


KINDS = {
    "AutoencoderKL": Kind(build=autoencoders.kl, latent=(1, 4)),
    "AutoencoderKLTemporalDecoder": Kind(build=_temporal, latent=(3, 4), scale=2, decode={"num_frames": 3}),
    "AutoencoderKLWan": Kind(build=autoencoders.wan, latent=(1, 16, 2), image=(1, 3, 5)),
    "AutoencoderKLQwenImage": Kind(build=autoencoders.qwen, latent=(1, 4, 1), image=(1, 3, 1)),
    "AutoencoderKLHunyuanVideo": Kind(build=autoencoders.hunyuan, latent=(1, 4, 3), image=(1, 3, 9)),
    "AutoencoderKLLTXVideo": Kind(build=autoencoders.ltx, latent=(1, 8, 2), image=(1, 3, 9)),
    "AutoencoderKLCogVideoX": Kind(build=autoencoders.cogvideox, latent=(1, 4, 3), image=(1, 3, 5)),
    "AutoencoderKLFlux2": Kind(build=autoencoders.flux2, latent=(1, 4)),
    "AsymmetricAutoencoderKL": Kind(build=_asymmetric, latent=(1, 4), scale=2),
    "AutoencoderTiny": Kind(build=_tiny, latent=(1, 4)),
}


@cache
def _built(name: str) -> nn.Module:
    with ONE_AT_A_TIME, seeded():  # ranks are threads here, and share the random numbers
        return enliven(KINDS[name].build().eval().requires_grad_(False))


def build(name: str) -> Any:
    """The same weights every time, CPU, fp32; a copy of one's own."""
    return copy.deepcopy(_built(name))


def structured(*shape: int, seed: int = 1) -> Tensor:
    """A field of mean 0 and variance 1 whose power falls with the frequency."""
    white = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    down, across = (torch.fft.fftfreq(size) for size in shape[-2:])
    frequency = (down[:, None].square() + across[None].square()).sqrt()
    frequency[0, 0] = 1 / max(shape[-2:])
    x = torch.fft.ifft2(torch.fft.fft2(white) * frequency ** (-SLOPE / 2)).real
    return ((x - x.mean()) / x.std()).contiguous()


def given(name: str, method: str, height: int, width: int) -> tuple[Tensor, dict[str, Any]]:
    """A latent of that size or the image of one, and the arguments beside it."""
    kind = KINDS[name]
    if method == "decode":
        return structured(*kind.latent, height, width), dict(kind.decode)
    return structured(*kind.image, kind.scale * height, kind.scale * width), {}


def plain(vae: Any, method: str, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """What the VAE itself gives."""
    with torch.no_grad():
        return tensors_of(getattr(vae, method)(x, **kwargs))[0]


def axis_of(transport: Transport, world: int) -> Axis:
    return Axis("image", transport.rank, world, tuple(range(world)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one rank got, and what it sent."""

    x: Tensor
    sent: dict[str, int]
    rounds: dict[str, int]


def in_bands(
    name: str, method: str, size: tuple[int, int], world: int, *, exchanging: bool = True, everywhere: bool = True
) -> list[Result]:
    """The method on every rank. Raises the first error of any."""
    x, kwargs = given(name, method, *size)
    return of_bands(name, method, x, kwargs, world, exchanging=exchanging, everywhere=everywhere)


def of_bands(
    name: str,
    method: str,
    x: Tensor,
    kwargs: dict[str, Any],
    world: int,
    *,
    exchanging: bool = True,
    everywhere: bool = True,
) -> list[Result]:
    """The same of any input."""

    def run(transport: Transport) -> Result:
        vae, comm = build(name), Communicator(transport)
        split = SplitMethod(vae, method, (comm, axis_of(transport, world)), None)
        split.exchanging = exchanging
        call = VaeCall(getattr(vae, method), x, (), kwargs)
        with torch.no_grad():
            assert split.takes(call)
            comm.traffic.clear()
            found = tensors_of(split(call, everywhere=everywhere))[0]
        return Result(x=found, sent=dict(comm.traffic.bytes_sent), rounds=dict(comm.traffic.rounds))

    return raised(on_threads(world, run, deadline=60.0))


def raised(results: list[Any]) -> list[Any]:
    """The results. Raises the first error among them."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
