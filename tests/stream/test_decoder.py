"""A video decoded block by block is the video decoded at once, to the last bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.models.streaming.decoder import DecoderState, WanDecoder, as_pixels, from_pixels
from tests.stream.tiny import vae
from tests.tensors import noise


def in_blocks(decoder: WanDecoder, latents: Tensor, ends: list[int]) -> Tensor:
    state = DecoderState()
    return torch.cat([decoder.decode(state, latents[:, :, a:b]) for a, b in pairwise([0, *ends])])


@pytest.mark.parametrize("ends", [[7], [3, 6, 7], [1, 2, 7]])
def test_wan(ends: list[int]) -> None:
    net, latents = vae(), noise(1, 16, 7, 4, 4)
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (net.config.latents_mean, net.config.latents_std))
    whole = net.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
    streamed = in_blocks(WanDecoder(net), latents, ends)
    assert streamed.shape == (13, 3, 8, 8)
    assert torch.equal(streamed, whole[0].transpose(0, 1))


def test_without_its_memory_wan_differs() -> None:
    net, latents = vae(), noise(1, 16, 6, 4, 4)
    decoder = WanDecoder(net)
    whole = in_blocks(decoder, latents, [6])
    fresh = decoder.decode(DecoderState(frames=3), latents[:, :, 3:])
    assert not torch.equal(fresh, whole[-len(fresh) :])


def test_an_image_encoded_is_what_the_pipelines_would_take() -> None:
    net = vae()
    image = noise(1, 3, 8, 12).clamp(-1, 1)
    latents = WanDecoder(net).encode(image)
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (net.config.latents_mean, net.config.latents_std))
    assert latents.shape == (1, 16, 1, 4, 6)
    assert torch.allclose(latents, (net.encode(image[:, :, None]).latent_dist.mode() - mean) / std, atol=1e-6)


def test_pixels() -> None:
    images = torch.tensor([-1.0, -0.5, 0.0, 1.0]).view(4, 1, 1, 1).expand(-1, 3, 2, 1)
    pixels = as_pixels(images)
    assert (pixels.shape, pixels.dtype) == ((4, 2, 1, 3), torch.uint8)
    assert pixels[:, 0, 0, 0].tolist() == [0, 64, 128, 255]
    assert torch.equal(as_pixels(from_pixels(pixels)), pixels)
    assert as_pixels(torch.empty(0, 3, 1, 1)).shape == (0, 1, 1, 3)


def test_what_is_no_number_is_no_black_image() -> None:
    """Of damaged weights, or in a dtype that is too narrow."""
    images = torch.zeros(2, 3, 4, 4, dtype=torch.float16)
    images[1, 2, 3, 0] = float("nan")
    with pytest.raises(UnsupportedModel, match=r"no numbers: the weights are damaged, or their dtype is too narrow"):
        as_pixels(images)
