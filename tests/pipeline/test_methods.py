"""Methods and attributes that replace networks, or sample: ranks and caller are afterwards as in diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderTiny
from peft import LoraConfig
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from patchpar import ParallelPipeline, PlanError, UnsupportedModel
from patchpar.pipeline.caller_values import refuse_networks
from tests.tiny import build

from .conftest import EXACT, QUICK, generator, relative_error

CALL = {**QUICK, "output_type": "latent"}


@pytest.fixture
def own_plain() -> Iterator[Any]:
    """A plain pipeline that a test may change."""
    return build("sdxl").pipe


def tiny_vae() -> AutoencoderTiny:
    widths = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
    blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    return AutoencoderTiny(latent_channels=4, **widths, **blocks).eval()


def image_encoder() -> CLIPVisionModelWithProjection:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes, image_size=8, patch_size=4)).eval()


def test_a_network_of_other_sizes(reloaded: ParallelPipeline, own_plain: Any) -> None:
    """Of the same class: its rows are divided by its own levels."""
    before = reloaded.description
    unet = own_plain.unet
    levels = [*unet.config.block_out_channels, unet.config.block_out_channels[-1]]
    kinds = {f"{side}_block_types": [f"{side.title()}Block2D"] * len(levels) for side in ("down", "up")}
    try:
        sizes = {"block_out_channels": levels, "transformer_layers_per_block": 1, "attention_head_dim": 4}
        reloaded.unet = type(unet).from_config({**unet.config, **kinds, **sizes})
        assert reloaded.description.total_stride == 2 * before.total_stride
    finally:
        reloaded._state.model = before


@pytest.mark.parametrize("registered", [False, True], ids=["set", "registered"])
def test_a_network_of_another_class(reloaded: ParallelPipeline, registered: bool) -> None:
    """Its methods can be called, as those of one that was there from the beginning."""
    before = reloaded.description
    vae, latents = tiny_vae(), torch.rand(1, 4, 2, 2)

    def put(**networks: Any) -> None:
        if registered:
            reloaded.register_modules(**networks)
            return
        for name, network in networks.items():
            setattr(reloaded, name, network)

    try:
        put(vae=vae, image_encoder=image_encoder(), text_encoder=None)
        assert repr(reloaded.vae) == "<pipe.vae, a AutoencoderTiny in the workers>"
        assert torch.equal(reloaded.vae.scale_latents(latents), vae.scale_latents(latents))
        assert reloaded.image_encoder.config.hidden_size == 8
        assert reloaded.text_encoder is None
        assert reloaded.description.latent_channels == 4
    finally:
        reloaded._state.model = before


def noise_of(pipe: Any, *given: Any) -> torch.Tensor:
    return pipe.prepare_latents(1, 4, 128, 128, torch.float32, torch.device("cpu"), *given)


def test_a_method_samples_from_the_callers_generators(parallel: ParallelPipeline, plain: Any) -> None:
    """Those of torch, and those among its arguments; they go on from where they are afterwards."""
    found = []
    for pipe in (plain, parallel):
        pipe(**CALL, generator=generator())  # the scheduler scales samples by the steps of the last call
        torch.manual_seed(3)
        given, named = generator(), generator(1)
        samples = [noise_of(pipe, None), noise_of(pipe, given), noise_of(pipe, given), torch.randn(3)]
        samples += [pipe.prepare_latents(1, 4, 64, 64, torch.float32, "cpu", generator=named), noise_of(pipe, [named])]
        found.append(samples)
    assert all(torch.equal(want, got) for want, got in zip(*found, strict=True))
    assert not torch.equal(found[1][1], found[1][2])


def test_an_adapter_with_random_weights(reloaded: ParallelPipeline, own_plain: Any) -> None:
    """They are the same on all ranks, those of a worker that is started later, and those of one process."""
    reloaded.plan = "cfg=2"
    config = LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v"])
    for pipe in (own_plain, reloaded):
        torch.manual_seed(0)
        pipe.unet.add_adapter(config, adapter_name="random")
    want = own_plain(**CALL, generator=generator())
    assert relative_error(reloaded(**CALL, generator=generator()), want) <= EXACT
    reloaded.release(1)
    reloaded.take_back(1)
    assert relative_error(reloaded(**CALL, generator=generator()), want) <= EXACT
    own_plain.delete_adapters("random")
    assert relative_error(own_plain(**CALL, generator=generator()), want) > 100 * EXACT


def test_a_method_that_replaces_a_module_and_returns_it(reloaded: ParallelPipeline) -> None:
    """It is made on all ranks, also those that start later, as others that change networks; nothing comes back."""
    size = reloaded.text_encoder.config.vocab_size + 3
    assert reloaded.text_encoder.resize_token_embeddings(size) is None
    reloaded.release(0)
    reloaded.take_back(0)
    assert reloaded.text_encoder.config.vocab_size == size
    with pytest.raises(UnsupportedModel, match=r"get_input_embeddings\(\) returned is a Embedding"):
        reloaded.text_encoder.get_input_embeddings()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("register_forward_hook", (print,), "could not remove the hook in the workers"),
        ("register_forward_pre_hook", (print,), "could not remove the hook in the workers"),
        ("buffers", (), "do not leave the workers"),
        ("named_buffers", (), "do not leave the workers"),
    ],
)
def test_methods_of_networks_whose_results_are_of_no_use(
    parallel: ParallelPipeline, name: str, arguments: Any, words: str
) -> None:
    """They are refused before the ranks do anything."""
    with pytest.raises(UnsupportedModel, match=words):
        getattr(parallel.unet, name)(*arguments)


def test_what_can_be_iterated_once_does_not_leave_a_rank() -> None:
    with pytest.raises(UnsupportedModel, match="what x returned is a generator that exists in the workers only"):
        refuse_networks("what x returned", (item for item in ()))


def test_a_change_of_a_tokenizer_that_was_read(parallel: ParallelPipeline, caplog: pytest.LogCaptureFixture) -> None:
    """It is no change of the ranks' own, which is said before the next call; use changes nothing."""
    before = parallel.tokenizer
    before("a red house" * 100)
    parallel(**CALL, generator=generator())
    assert not caplog.messages
    before.add_tokens(["<cat>"])
    parallel(**CALL, generator=generator())
    (message,) = caplog.messages
    assert message.startswith("pipe.tokenizer was changed, but what is read is a copy of it")
    parallel.tokenizer.model_max_length = 5
    parallel(**CALL, generator=generator())
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("dtype", ["auto", "Tensor", 16])
def test_a_dtype_that_is_none(sdxl_folder: Path, dtype: Any) -> None:
    with pytest.raises(PlanError, match=f"torch_dtype={dtype!r}: use a dtype of torch or its name"):
        ParallelPipeline.from_pretrained(sdxl_folder, devices="cpu:1", torch_dtype=dtype)


def test_a_progress_bar_is_that_of_diffusers(parallel: ParallelPipeline, plain: Any) -> None:
    """Of this process, with the options that are set; a program may have loops of its own."""
    for pipe in (plain, parallel):
        pipe.set_progress_bar_config(disable=True, desc="mine")
        with pipe.progress_bar(total=3) as bar:
            bar.update()
        assert (type(bar).__name__, bar.total, bar.disable) == (type(plain.progress_bar(total=3)).__name__, 3, True)
        assert list(pipe.progress_bar(range(2))) == [0, 1]
        with pytest.raises(ValueError, match="Either `total` or `iterable`"):
            pipe.progress_bar()
        pipe.set_progress_bar_config(disable=True)
