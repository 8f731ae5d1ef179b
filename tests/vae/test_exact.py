"""Encoding and decoding in bands is what one process does, for every class of VAE: at least 100 dB in fp32."""

from __future__ import annotations

import pytest
import torch

from patchpar.shard.vae import convolution
from tests.breadth import first_of
from tests.tensors import psnr_db

from .autoencoders import KINDS, build, given, in_bands, of_bands, plain

METHODS = ("decode", "encode")
UNEVEN = (7, 6)  # latent rows and columns: 3 ranks have 3, 2 and 2 rows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name", first_of(KINDS, *(name for name in list(KINDS)[::2] if name != "AutoencoderKLCogVideoX"))
)
def test_every_class_on_three_ranks(name: str, method: str) -> None:
    want = plain(build(name), method, *given(name, method, *UNEVEN))
    for result in in_bands(name, method, UNEVEN, 3):
        assert result.x.shape == want.shape
        assert psnr_db(result.x, want) >= 100


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", first_of(KINDS, *list(KINDS)[::4]))
def test_without_exchange_it_is_not(name: str, method: str) -> None:
    """The negative control: every band alone."""
    want = plain(build(name), method, *given(name, method, *UNEVEN))
    assert psnr_db(in_bands(name, method, UNEVEN, 3, exchanging=False)[0].x, want) < 60


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", first_of(KINDS, "AutoencoderKL", "AutoencoderKLWan"))
def test_halos_joined_as_on_gpus(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "copies_band", lambda conv, x, *, has_halo: True)
    want = plain(build(name), method, *given(name, method, *UNEVEN))
    for result in in_bands(name, method, UNEVEN, 3):
        assert psnr_db(result.x, want) >= 100


@pytest.mark.parametrize("world", first_of([2, 4], 4))
@pytest.mark.parametrize(
    "size", [pytest.param((8, 6), marks=pytest.mark.breadth), (9, 5), (5, 12)], ids=["even", "uneven", "columns"]
)
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_ranks_and_rows(method: str, size: tuple[int, int], world: int) -> None:
    want = plain(build("AutoencoderKL"), method, *given("AutoencoderKL", method, *size))
    for result in in_bands("AutoencoderKL", method, size, world):
        assert psnr_db(result.x, want) >= 100


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_flat_image_is_encoded_as_in_double_precision(layout: torch.memory_format) -> None:
    """Whatever its layout in memory: one process itself is off by far more where channels are last (see accuracy)."""
    image = -torch.ones(1, 3, 64, 48).to(memory_format=layout)
    want = plain(build("AutoencoderKL").double(), "encode", image.double(), {})
    for result in of_bands("AutoencoderKL", "encode", image, {}, 2):
        assert psnr_db(result.x.double(), want) >= 100


@pytest.mark.parametrize("exchanging", [True, False])
def test_the_edge_of_a_band_of_one_row(exchanging: bool) -> None:
    want = plain(build("AutoencoderKL"), "decode", *given("AutoencoderKL", "decode", 4, 3))
    found = in_bands("AutoencoderKL", "decode", (4, 3), 4, exchanging=exchanging)
    assert (psnr_db(found[0].x, want) >= 100) == exchanging


def test_only_the_first_rank_gets_the_image() -> None:
    want = plain(build("AutoencoderKL"), "decode", *given("AutoencoderKL", "decode", *UNEVEN))
    first, *others = in_bands("AutoencoderKL", "decode", UNEVEN, 3, everywhere=False)
    assert psnr_db(first.x, want) >= 100
    assert not first.sent["result"]
    for other in others:
        assert other.x.shape == want.shape
        assert not other.x.any()
        assert other.sent["result"] == want[:, :, :16].numel() * 4  # its two latent rows, once


def test_one_round_for_a_norm_and_its_convolution() -> None:
    """Convolutions that no norm feeds have a round of their own: the first, and one after each upsampling."""
    vae = build("AutoencoderKL")
    norms = sum(isinstance(module, torch.nn.GroupNorm) for module in vae.decoder.modules())
    rounds = in_bands("AutoencoderKL", "decode", (8, 6), 2)[1].rounds
    assert rounds == {"halo": 1 + 3, "moments+halo": norms - 1, "moments": 1, "kv": 1, "result": 1}
