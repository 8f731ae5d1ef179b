"""What is found in a denoiser by watching it run, and which of its arguments are images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from patchpar.errors import ExchangeError, UnsupportedModel
from patchpar.shard.unet.discover import ExchangeSites, discover, splits_into_bands
from patchpar.shard.unet.install import plain_at
from patchpar.shard.unet.spatial_arguments import MapScale, level_of, map_of, with_sample_size
from tests.exact import denoisers

Key = torch.utils._pytree.MappingKey


def sites_of(name: str) -> tuple[nn.Module, ExchangeSites]:
    denoiser = denoisers.build(name)
    return denoiser, discover(denoiser, denoiser.forward, (), denoisers.call(name, 16, 8))


@pytest.mark.parametrize("name", ["sd", "sdxl", "svd", "motion", "unet3d", "asymmetric"])
def test_what_is_spatial_in_a_unet(name: str) -> None:
    denoiser, sites = sites_of(name)
    modules: dict[str, Any] = dict(denoiser.named_modules())
    kernels = {
        path for path, m in modules.items() if isinstance(m, nn.Conv2d | nn.Conv3d) and max(m.kernel_size[-2:]) > 1
    }
    assert {site.path for site in sites.convs} == kernels
    assert [site.path for site in sites.convs if site.reads_sample] == (
        [] if name in ("motion", "unet3d") else ["conv_in"]  # they move the frames before the channels first
    )
    assert {site.path for site in sites.norms} == {p for p, m in modules.items() if isinstance(m, nn.GroupNorm)}
    assert sites.total_stride == (2 if name in ("svd", "unet3d") else 4)
    cross_or_temporal = ("attn2", "temporal", "temp_", "motion", "transformer_in")
    assert all(not any(word in path for word in cross_or_temporal) for path in sites.attentions)
    assert len(sites.attentions) == {"sd": 7, "sdxl": 11, "svd": 4, "motion": 7, "unet3d": 4, "asymmetric": 4}[name]


def test_norms_are_joined_with_the_convolutions_they_feed() -> None:
    _, sites = sites_of("sdxl")
    fed = {norm.path: (norm.convs, norm.activations) for norm in sites.norms}
    for path in fed:
        block, _, last = path.rpartition(".")
        if last in ("norm1", "norm2"):
            activations = fed[path][1]
            assert fed[path][0] == (f"{block}.conv{last[-1]}",)
            assert activations[0] == f"{block}.nonlinearity"
        elif last == "norm":  # of a transformer: a projection per pixel follows
            assert fed[path] == ((), ())
    assert fed["conv_norm_out"] == (("conv_out",), ("conv_act",))


def test_a_model_that_pads_by_itself() -> None:
    _, sites = sites_of("asymmetric")
    assert [site.path for site in sites.convs if site.trailing] == [
        f"down_blocks.{i}.downsamplers.0.conv" for i in range(2)
    ]


def test_poolings_of_whole_maps() -> None:
    """What has another size in a larger image is pooled in every band by itself."""
    assert sites_of("i2vgen")[1].pools == ("image_latents_context_embedding.2",)
    assert sites_of("sdxl")[1].pools == ()
    assert "1 poolings of whole maps" in sites_of("i2vgen")[1].describe()


def test_a_denoiser_without_convolutions_is_refused() -> None:
    class Tokens(nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            return sample

    with pytest.raises(UnsupportedModel, match=r"Tokens has no convolution over rows.*cfg or data"):
        discover(Tokens(), Tokens().forward, (torch.zeros(1, 4, 8, 8),), {})
    assert not splits_into_bands(Tokens())
    assert splits_into_bands(denoisers.build("sd"))


class Beside(nn.Module):
    """An image beside the latent, twice as large."""

    def __init__(self, size: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.size = size
        self.read, self.mix = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, sample: torch.Tensor, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return self.mix(sample) + self.read(image if self.size is None else image.reshape(*self.size)) + text.sum()


def test_another_argument_as_large_as_the_image_goes_with_it() -> None:
    call = (torch.zeros(1, 4, 8, 8), torch.zeros(1, 3, 7, 16), torch.zeros(1, 4, 16, 16))
    model = Beside()
    sites = discover(model, model.forward, call, {})
    assert sites.beside == ("[0][2]",)
    assert (sites.total_stride, {site.path for site in sites.convs}) == (1, {"read", "mix"})
    _, other = with_sample_size((), {"sample": call[0], "picture": call[2]}, (5, 7), beside=("[1]['picture']",))
    assert other["picture"].shape == (1, 4, 10, 14)


def test_an_argument_of_another_size_that_stays_is_refused() -> None:
    call = (torch.zeros(1, 4, 8, 8), torch.zeros(1, 7), torch.zeros(1, 4, 16, 16))
    model = Beside((1, 4, 16, 16))
    with pytest.raises(UnsupportedModel, match=r"Beside does not run at the sizes.*another argument.*cfg=2"):
        discover(model, model.forward, call, {})


def test_a_call_that_fails_by_itself_is_no_fault_of_the_split() -> None:
    model = Beside()
    with pytest.raises(RuntimeError, match="to have 4 channels, but got 3 channels"):
        discover(model, model.forward, (torch.zeros(1, 3, 8, 8), torch.zeros(1, 7), torch.zeros(1, 4, 16, 16)), {})


class Particular(Beside):
    """Fails at some sizes by an error of its own."""

    def __init__(self, error: Exception, sizes: set[int]) -> None:
        super().__init__()
        self.error, self.sizes = error, sizes

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        if sample.shape[-1] in self.sizes:
            raise self.error
        return self.mix(sample)


@pytest.mark.parametrize("error", [RuntimeError("odd"), ValueError("not a multiple of 16"), AssertionError()], ids=repr)
def test_sizes_that_a_denoiser_refuses_are_skipped(error: Exception) -> None:
    model = Particular(error, {8})
    assert discover(model, model.forward, (torch.zeros(1, 4, 32, 32),), {}).total_stride == 1


@pytest.mark.parametrize("error", [ExchangeError("rank 1 is late"), torch.OutOfMemoryError("full")], ids=repr)
def test_a_lost_rank_or_memory_is_no_property_of_a_denoiser(error: Exception) -> None:
    """A job that ends with these is made again, on other ranks; what cannot be split is not."""
    model = Particular(error, {8, 16, 32})
    with pytest.raises(type(error)) as raised:
        discover(model, model.forward, (torch.zeros(1, 4, 32, 32),), {})
    assert raised.value is error


@pytest.mark.parametrize(
    ("error", "is_skipped"), [(ValueError("odd"), True), (ExchangeError("late"), False)], ids=["own", "lost rank"]
)
def test_a_size_to_verify_at_is_skipped_where_the_denoiser_refuses_it(error: Exception, is_skipped: bool) -> None:
    model = Particular(error, {2})
    known, call = discover(model, model.forward, (torch.zeros(1, 4, 32, 32),), {}), ((torch.zeros(1, 4, 32, 32),), {})
    if is_skipped:
        assert plain_at([(4, 2), (4, 4)], model.forward, call, known, 0)[0] == (4, 4)
    else:
        with pytest.raises(type(error)):
            plain_at([(4, 2), (4, 4)], model.forward, call, known, 0)


def test_the_sample_of_a_call() -> None:
    x = torch.zeros(1, 4, 8, 8)
    assert map_of((x, 3), {}) is x
    assert map_of((), {"sample": x}) is x
    assert map_of((), {"hidden_states": x}) is x
    with pytest.raises(UnsupportedModel, match="no image-shaped latent"):
        map_of((torch.zeros(1, 64, 4),), {})


@pytest.mark.parametrize(("height", "width"), [(32, 24), (33, 25), (35, 21)])
@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_residuals_are_cut_at_their_own_level(height: int, width: int, stride: int) -> None:
    sample = torch.zeros(1, 4, height, width)
    residual = torch.zeros(1, 4, -(-height // stride), -(-width // stride))
    level = level_of((Key("mid_block_additional_residual"),), residual, sample)
    assert level == MapScale(stride=stride)
    assert (level.of(height), level.of(width)) == residual.shape[-2:]


def test_what_is_no_image_stays_whole() -> None:
    sample = torch.zeros(1, 4, 32, 32)
    assert level_of((Key("sample"),), sample, sample) == MapScale()
    assert level_of((Key("encoder_hidden_states"),), torch.zeros(1, 32, 32), sample) is None
    assert level_of((Key("image_embeds"),), torch.zeros(1, 4, 32, 32), sample) is None  # as large by chance
    assert level_of((Key("timestep"),), 3, sample) is None
    with pytest.raises(UnsupportedModel, match=r"residual of .*7.* fits no level of a latent of 32 x 32"):
        level_of((Key("residual"),), torch.zeros(1, 4, 7, 32), sample)


def test_the_same_call_at_another_size() -> None:
    call = denoisers.call("controlnet", 16, 8)
    _, other = with_sample_size((), call, (33, 21))
    assert other["sample"].shape == (2, 4, 33, 21)
    assert other["encoder_hidden_states"] is call["encoder_hidden_states"]
    shapes = [tuple(x.shape) for x in other["down_block_additional_residuals"]]
    assert shapes == [(2, 16, 33, 21)] * 2 + [(2, 16, 17, 11), (2, 32, 17, 11)] + [(2, 32, 9, 6)] * 2
    _, again = with_sample_size((), call, (33, 21))
    assert torch.equal(again["sample"], other["sample"])  # the same noise on every rank


@pytest.mark.parametrize("halvings", [1, 3, 5])
def test_the_probe_is_as_large_as_the_total_stride_needs(halvings: int) -> None:
    """Two rows are left at the coarsest convolution, so that what halves the rows there is seen."""
    seen = []

    class Coarse(nn.Sequential):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(sample.shape[-2:]))
            return super().forward(sample)

    model = Coarse(*(nn.Conv2d(4, 4, 3, stride=2, padding=1) for _ in range(halvings)), nn.Conv2d(4, 4, 3, padding=1))
    sites = discover(model, model.forward, (torch.zeros(1, 4, 64, 64),), {})
    assert sites.total_stride == 2**halvings
    size = {1: 8, 3: 16, 5: 32}[halvings]
    assert seen[-2:] == [(size, size), (2 * size, size)]


def test_arguments_in_another_dtype_are_not_taken_for_images_beside_the_latent() -> None:
    """No plan helps there: the plain network fails too. Control: what only the probe's sizes do not fit is refused."""
    denoiser = denoisers.build("sdxl")
    call = denoisers.call("sdxl", 16, 8)
    halved = dict(call)
    for name, value in call.items():
        if torch.is_tensor(value) and value.ndim == 3:
            halved[name] = value.half()
    with pytest.raises(RuntimeError, match="same dtype"):
        discover(denoiser, denoiser.forward, (), halved)

    def fails(*_: Any, **given: Any) -> Any:
        if given["sample"].shape != call["sample"].shape:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return denoiser(**given)

    with pytest.raises(UnsupportedModel, match="does not run at the sizes"):
        discover(denoiser, fails, (), call)
