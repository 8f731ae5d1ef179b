"""The mask is the attention that places pay to content tokens, and costs the image nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline
from torch import nn
from torch.nn import functional as F

from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.attention_map import AttentionMap, AttentionRecorder
from patchpar.strategies.structure.content_tokens import ContentTokens
from patchpar.strategies.structure.initial_noise import SharedNoise
from patchpar.strategies.structure.options import StructureGuidance
from tests.tensors import noise
from tests.tiny import Tiny, build


def layer_of(tiny: Tiny) -> nn.Module:
    return AttentionMap(tiny.denoiser).layers[0][0]


@pytest.fixture(scope="module")
def sd() -> Tiny:
    return build("sd")


def test_up_blocks_of_a_unet_are_listened_to(sd: Tiny) -> None:
    layers = [layer for layer, _ in AttentionMap(sd.denoiser).layers]
    named = {id(module): name for name, module in sd.denoiser.named_modules()}
    assert layers
    assert all(named[id(layer)].startswith("up_blocks") and named[id(layer)].endswith("attn2") for layer in layers)
    assert AttentionMap(nn.Linear(2, 2)).layers == []


def test_the_middle_half_of_a_transformer_is_listened_to() -> None:
    kind = type("FluxAttnProcessor", (), {})
    blocks = nn.ModuleList([nn.ModuleDict({"attn": nn.Module()}) for _ in range(8)])
    for block in blocks:
        block["attn"].processor, block["attn"].add_k_proj = kind(), nn.Linear(2, 2)
    assert AttentionMap(nn.ModuleDict({"blocks": blocks})).layers == [(block["attn"], True) for block in blocks[2:6]]


def test_keys_of_something_else_are_not_listened_to() -> None:
    """Such as those of an image prompt, which the same layer attends to."""
    recording, query = AttentionRecorder(torch.ones(1, 5)), noise(1, 3, 16, 8)
    with recording:
        recording.enter(None)
        F.scaled_dot_product_attention(query, query[:, :, :4], query[:, :, :4])
    assert recording.mask((4, 4)) is None


@pytest.mark.parametrize("text_first", [None, True, False])
def test_one_column_of_values_sums_the_map(text_first: bool | None) -> None:
    """Against the softmax written out, for cross-attention and for joint attention in both orders."""
    weights = torch.tensor([[0.0, 1, 1, 0, 1], [0, 0, 1, 1, 0]])
    image_q, text_k, image_k = noise(4, 3, 16, 8), noise(4, 3, 5, 8, seed=1), noise(4, 3, 16, 8, seed=2)
    query, key = image_q, text_k
    if text_first is not None:
        text_q = noise(4, 3, 5, 8, seed=3)
        order = slice(None, None, 1 if text_first else -1)
        query, key = torch.cat([text_q, image_q][order], 2), torch.cat([text_k, image_k][order], 2)
    recording = AttentionRecorder(weights)
    with recording:
        recording.enter(text_first)
        F.scaled_dot_product_attention(query, key, key)
        recording.leave()
        F.scaled_dot_product_attention(query, key, key)  # of another layer
    written = (image_q[2:] @ text_k[2:].transpose(-1, -2) / 8**0.5).softmax(-1) @ weights[:, None, :, None]
    mean = written[..., 0].mean(1).reshape(2, 1, 4, 4)
    low, high = mean.amin((2, 3), keepdim=True), mean.amax((2, 3), keepdim=True)
    mask = recording.mask((4, 4))
    assert mask is not None
    assert torch.allclose(mask, (mean - low) / (high - low), atol=1e-5)
    assert recording.mask((5, 7)) is None  # no map of that size has sixteen places


@pytest.mark.parametrize("pipeline", ["sd", "sdxl", "sd3", "flux"])
def test_a_denoiser_tells_and_answers_as_before(pipeline: str) -> None:
    """Maps of its own come out of a real call, which returns the same to the bit, and nothing stays behind."""
    tiny, seen = build(pipeline), []
    attention = AttentionMap(tiny.denoiser)

    def record(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))

    hook = tiny.denoiser.register_forward_pre_hook(record, with_kwargs=True)
    content = ContentTokens(tiny.pipe)
    tiny.pipe(**tiny.call_kwargs, num_inference_steps=1, output_type="latent")
    hook.remove()
    args, kwargs = seen[0]
    with torch.no_grad():
        plain = tiny.denoiser(*args, **kwargs)[0]
        recording = AttentionRecorder(content.weights(1, kwargs["encoder_hidden_states"].shape[1]))
        with attention.recorded_by(recording):
            assert torch.equal(tiny.denoiser(*args, **kwargs)[0], plain)
    mask = recording.mask((16, 16))
    assert mask is not None
    assert mask.shape == (1, 1, 16, 16)
    assert mask.min() == 0
    assert mask.max() == 1
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer, _ in attention.layers)
    content.close()


def test_words_are_content(sd: Tiny) -> None:
    """Not the marks of beginning and end, not padding, not words without a thing; the prompt's, not the negative's."""
    content, tokenizer = ContentTokens(sd.pipe), sd.pipe.tokenizer
    sd.pipe.encode_prompt("a small red house", "cpu", 1, True, negative_prompt="blue")
    ids = tokenizer("a small red house").input_ids
    count = tokenizer.model_max_length
    weights = content.weights(1, count)[0]
    words = [tokenizer.convert_ids_to_tokens(each).removesuffix("</w>") for each in ids]
    wanted = [
        float(each not in tokenizer.all_special_ids and word != "a") for each, word in zip(ids, words, strict=True)
    ]
    assert weights[: len(ids)].tolist() == wanted
    assert 0 < sum(wanted) < len(wanted)
    assert weights[len(ids) :].sum() == 0
    assert torch.equal(content.weights(3, count), weights.expand(3, -1))
    longer = content.weights(1, count + 4)[0]
    assert longer[count:].sum() == 0
    content.reset()
    assert content.weights(1, 4).tolist() == [[0, 1, 1, 1]]  # nothing is known
    content.close()


def test_words_of_each_image(sd: Tiny) -> None:
    """Of its own prompt, of which there may be several images; and of an empty one all but the first token."""
    content, prompts = ContentTokens(sd.pipe), ["a small red house", "the boat", ""]
    count = sd.pipe.tokenizer.model_max_length
    alone = []
    for prompt in (*prompts, prompts):
        content.reset()
        sd.pipe.encode_prompt(prompt, "cpu", 1, False)
        alone.append(content.weights(1 if prompt is not prompts else 6, count))
    assert torch.equal(alone[3], torch.cat(alone[:3]).repeat_interleave(2, 0))
    assert alone[2].tolist() == [[0.0] + [1.0] * (count - 1)]
    assert not torch.equal(alone[0], alone[1])
    content.close()


def test_words_of_two_encoders_one_after_the_other() -> None:
    """The first and the last, as in SD3; where the last has another length its tokens are taken for padding."""
    encoders = SimpleNamespace(text_encoder=nn.Embedding(1, 2), text_encoder_3=nn.Embedding(1, 2))
    content = ContentTokens(encoders)
    encoders.text_encoder(torch.zeros(1, 3, dtype=torch.long))
    encoders.text_encoder_3(torch.zeros(1, 5, dtype=torch.long))
    assert content.weights(1, 8).tolist() == [[1.0] * 8]
    assert content.weights(1, 9).tolist() == [[1.0] * 3 + [0.0] * 6]
    content.close()


def test_words_of_a_negative_prompt_are_not_content(sd: Tiny) -> None:
    """Beside embeddings of a prompt it is the only text that is encoded."""
    found = StructureGuidance(native=64, preset="paper", shared_noise=0.0)
    large = found.install(sd.denoiser, None, Axis("patch"), pipe=sd.pipe)  # type: ignore[arg-type]
    count, embeddings = sd.pipe.tokenizer.model_max_length, noise(1, 77, 32)
    try:
        for call, known in (({"prompt": "a red house"}, True), ({"prompt_embeds": embeddings}, False)):
            large.expect(call)
            large.reset()
            given = call | {"prompt": call.get("prompt"), "negative_prompt": "blue"}
            sd.pipe.encode_prompt(device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True, **given)
            assert bool(large._content.weights(1, count).sum() < count - 1) is known
            large.finish()
    finally:
        large.restore()


def test_a_pipeline_that_is_refused_is_left_as_it_was(sd: Tiny) -> None:
    """One that begins with an image has no noise of its own to correlate."""
    pipe = StableDiffusionImg2ImgPipeline(**sd.pipe.components, requires_safety_checker=False)
    options, axis = StructureGuidance(native=64, preset="paper", shared_noise=0.1), Axis("patch")
    with pytest.raises(UnsupportedModel, match=r"shared_noise=0.1: .*Img2ImgPipeline does not begin with noise alone"):
        options.install(sd.denoiser, None, axis, pipe=pipe)  # type: ignore[arg-type]
    assert not pipe.text_encoder._forward_pre_hooks
    assert "prepare_latents" not in vars(pipe)


@pytest.mark.parametrize("latents", [torch.zeros(1, 16, 8), torch.zeros(1, 4, 3, 8, 8)], ids=["tokens", "video"])
def test_noise_that_is_no_image_is_not_correlated(latents: torch.Tensor) -> None:
    pipe = SimpleNamespace(prepare_latents=lambda: latents)
    shared = SharedNoise(pipe, 0.1, lambda x: pytest.fail("it is no map"))
    with pytest.raises(UnsupportedModel, match=r"shared_noise=0.1: SimpleNamespace .*: use shared_noise=0"):
        pipe.prepare_latents()
    shared.close()
    assert pipe.prepare_latents() is latents
