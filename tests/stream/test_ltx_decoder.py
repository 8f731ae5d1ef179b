"""LTX's decoder frame by frame gives the images of the whole video, though it looks ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.models.streaming.fifo.ltx_decoder import LtxDecoder, latents_late
from tests.tensors import noise

SCALING = (True, True, True, False)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"decoder_causal": True},
    "with timesteps": {"timestep_conditioning": True},
    "with shortcuts": {
        "decoder_block_out_channels": (8, 16, 32),
        "decoder_layers_per_block": (1,) * 4,
        "decoder_spatio_temporal_scaling": (True,) * 3,
        "decoder_inject_noise": (False,) * 4,
        "upsample_residual": (True,) * 3,
        "upsample_factor": (2,) * 3,
        "timestep_conditioning": True,
    },
    "of growing width": {"decoder_block_out_channels": (8, 16, 16, 16)},
    "in patches": {"patch_size": 2},
}


def vae(**options: Any) -> AutoencoderKLLTXVideo:
    """Three levels that halve space and time: 8 images for a latent frame."""
    torch.manual_seed(2)
    chosen: dict[str, Any] = {
        "latent_channels": 8,
        "block_out_channels": (8,) * 4,
        "decoder_block_out_channels": (8,) * 4,
        "layers_per_block": (1,) * 5,
        "decoder_layers_per_block": (1,) * 5,
        "spatio_temporal_scaling": SCALING,
        "decoder_spatio_temporal_scaling": SCALING,
        "decoder_inject_noise": (False,) * 5,
        "upsample_residual": (False,) * 4,
        "upsample_factor": (1,) * 4,
        "patch_size": 1,
        "patch_size_t": 1,
    }
    net = AutoencoderKLLTXVideo(**chosen | options).eval().requires_grad_(False)
    net.latents_mean.copy_(noise(8, seed=3))
    net.latents_std.copy_(noise(8, seed=4).abs() + 0.5)
    return net


def whole(net: AutoencoderKLLTXVideo, latents: Tensor) -> Tensor:
    """As LTXPipeline decodes."""
    mean, std = (x.view(1, -1, 1, 1, 1) for x in (net.latents_mean, net.latents_std))
    when = torch.zeros(1) if net.config.timestep_conditioning else None
    video: Tensor = net.decode(latents * std / net.config.scaling_factor + mean, when, return_dict=False)[0]
    return video[0].transpose(0, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[1], [], [2, 1, 4, 1]], ids=["one frame", "frame by frame", "in pieces"])
@torch.no_grad()
def test_images_are_those_of_the_whole_video(kind: str, pieces: list[int]) -> None:
    net = vae(**KINDS[kind])
    late = latents_late(net)
    is_slow, pieces = not pieces, pieces or [1] * (late + 3)
    latents = noise(1, 8, sum(pieces), 3, 2, seed=5)
    wanted = whole(net, latents)
    decoder = LtxDecoder(net)
    state, found, settled = decoder.new_state(), [], []
    for piece in latents.split(pieces, 2):
        found.append(decoder.decode(state, piece))
        settled.append(sum(len(images) for images in found))
    found.append(decoder.finish(state))
    video = torch.cat([images for images in found if len(images)])
    assert video.shape == wanted.shape == (8 * sum(pieces) - 7, 3, *wanted.shape[2:])
    assert (video - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (late == 0) == (kind == "causal")
    if is_slow:
        assert all(count >= 1 + 8 * (number - late) for number, count in enumerate(settled) if number >= late)


@torch.no_grad()
def test_what_is_ahead_matters() -> None:
    """A video that ends sooner has other images before its end, as if nothing had been waited for."""
    net = vae()
    latents = noise(1, 8, 6, 3, 2, seed=5)
    decoder = LtxDecoder(net)
    state = decoder.new_state()
    found = [decoder.decode(state, latents[:, :, :3]), decoder.finish(state)]
    video, wanted = torch.cat([images for images in found if len(images)]), whole(net, latents)
    assert len(video) == 17
    assert (video[-1] - wanted[16]).abs().max() > 1e-3 * wanted.abs().max()


def test_how_late_the_layers_of_version_0_9_are() -> None:
    with torch.device("meta"):
        assert latents_late(AutoencoderKLLTXVideo()) == 24


def test_noise_in_the_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="decoder_inject_noise"):
        LtxDecoder(vae(decoder_inject_noise=(True,) * 5))
