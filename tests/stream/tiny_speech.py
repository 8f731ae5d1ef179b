"""Live Avatar of a few thousand weights, in the layout in which it is published: Wan-S2V, wav2vec2 and a LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from patchpar.models.streaming.convert import WAV2VEC2
from patchpar.models.streaming.video_folder import HIGH_NOISE
from tests.stream.test_convert import SAFETENSORS, Weights, original
from tests.stream.tiny import transformer
from tests.tensors import noise
from tests.tiny import encoders, tokenizers

DIM, HEADS, LAYERS, FEATURES, TOKENS, AFTER = 24, 2, 3, 16, 4, (0, 1)
ROWS, COLUMNS, SPATIAL, LORA_RANK = 8, 16, 4, 2
LORA_LAYERS = ("blocks.0.self_attn.q", "blocks.1.ffn.2", "audio_injector.injector.1.o")
SHAPES: dict[str, tuple[int, ...]] = {
    "casual_audio_encoder.weights": (1, LAYERS, 1, 1),
    "casual_audio_encoder.encoder.conv1_local.conv.weight": (DIM // 4 * TOKENS, FEATURES, 3),
    "casual_audio_encoder.encoder.conv1_local.conv.bias": (DIM // 4 * TOKENS,),
    "casual_audio_encoder.encoder.conv1_global.conv.weight": (DIM // 4, FEATURES, 3),
    "casual_audio_encoder.encoder.conv1_global.conv.bias": (DIM // 4,),
    "casual_audio_encoder.encoder.conv2.conv.weight": (DIM // 2, DIM // 4, 3),
    "casual_audio_encoder.encoder.conv2.conv.bias": (DIM // 2,),
    "casual_audio_encoder.encoder.conv3.conv.weight": (DIM, DIM // 2, 3),
    "casual_audio_encoder.encoder.conv3.conv.bias": (DIM,),
    "casual_audio_encoder.encoder.final_linear.weight": (DIM, DIM),
    "casual_audio_encoder.encoder.final_linear.bias": (DIM,),
    "casual_audio_encoder.encoder.padding_tokens": (1, 1, 1, DIM),
    "frame_packer.proj.weight": (DIM, 16, 1, 2, 2),
    "frame_packer.proj.bias": (DIM,),
    "frame_packer.proj_2x.weight": (DIM, 16, 2, 4, 4),
    "frame_packer.proj_2x.bias": (DIM,),
    "frame_packer.proj_4x.weight": (DIM, 16, 4, 8, 8),
    "frame_packer.proj_4x.bias": (DIM,),
    "cond_encoder.weight": (DIM, 16, 1, 2, 2),
    "cond_encoder.bias": (DIM,),
    "trainable_cond_mask.weight": (3, DIM),
}
for _number in range(len(AFTER)):
    for _name in "qkvo":
        SHAPES[f"audio_injector.injector.{_number}.{_name}.weight"] = (DIM, DIM)
        SHAPES[f"audio_injector.injector.{_number}.{_name}.bias"] = (DIM,)
    for _name in ("norm_q", "norm_k"):
        SHAPES[f"audio_injector.injector.{_number}.{_name}.weight"] = (DIM,)
    SHAPES[f"audio_injector.injector_adain_layers.{_number}.linear.weight"] = (2 * DIM, DIM)
    SHAPES[f"audio_injector.injector_adain_layers.{_number}.linear.bias"] = (2 * DIM,)


def speech_weights() -> Weights:
    """Wan-S2V's own names, random, each with an effect."""
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        fan = max(1, int(torch.tensor(shape[1:]).prod())) if len(shape) > 1 else 1
        found[name] = noise(*shape, seed=1000 + number) * (0.5 if len(shape) == 1 else fan**-0.5)
    return found


def vae() -> AutoencoderKLWan:
    torch.manual_seed(2)
    net = AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1],
        num_res_blocks=0,
        temperal_downsample=[True, True],
        scale_factor_temporal=4,
        scale_factor_spatial=SPATIAL,
    )
    return net.eval().requires_grad_(False)


def write_base(folder: Path) -> Path:
    """The text-to-video model with the other components."""
    encoder = encoders.umt5()
    WanPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoder,
        vae=vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=transformer(text_dim=encoder.config.d_model),
    ).save_pretrained(folder)
    return folder


def wav2vec2() -> Any:
    """With the strides of the published one: 50 hidden states per second."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(3)
    config = Wav2Vec2Config(
        hidden_size=FEATURES,
        num_hidden_layers=LAYERS - 1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8,) * 7,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        vocab_size=8,
        conv_bias=True,
    )
    return Wav2Vec2ForCTC(config).eval()


def published(base: Path) -> Weights:
    """The transformer's weights and those of the other parts, under the names of Wan-S2V."""
    of_base = load_file(base / HIGH_NOISE / SAFETENSORS)
    changed = {name: x + 0.1 * noise(*x.shape, seed=number) for number, (name, x) in enumerate(of_base.items())}
    return {**original(changed), **speech_weights()}


def write_checkpoint(folder: Path, weights: Weights, **facts: Any) -> Path:
    """Two files of weights, a config.json, and wav2vec2's folder."""
    folder.mkdir()
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = folder / f"diffusion_pytorch_model-{number:05}-of-00002.safetensors"
        save_file({name: weights[name].contiguous() for name in part}, file)
    known = {"audio_inject_layers": list(AFTER), "enable_adain": True, "adain_mode": "attn_norm", "model_type": "s2v"}
    (folder / "config.json").write_text(json.dumps({**known, **facts}))
    wav2vec2().save_pretrained(folder / WAV2VEC2)
    (folder / WAV2VEC2 / "preprocessor_config.json").write_text(json.dumps({"do_normalize": True}))
    return folder


def lora(weights: Weights) -> Weights:
    """Factors under PEFT's names, without alpha."""
    found = {}
    for number, layer in enumerate(LORA_LAYERS):
        out, inside = weights[f"{layer}.weight"].shape
        found[f"{layer}.lora_A.weight"] = noise(LORA_RANK, inside, seed=2 * number)
        found[f"{layer}.lora_B.weight"] = 0.01 * noise(out, LORA_RANK, seed=2 * number + 1)
    return found


def merged(weights: Weights, factors: Weights, alpha: float) -> Weights:
    found = dict(weights)
    for layer in LORA_LAYERS:
        down, up = (factors[f"{layer}.lora_{name}.weight"] for name in "AB")
        found[f"{layer}.weight"] = weights[f"{layer}.weight"] + alpha / LORA_RANK * up @ down
    return found


def samples(seconds: float, seed: int = 5) -> Tensor:
    """Speech, as far as a random network can tell."""
    return (0.3 * noise(round(16000 * seconds), seed=seed)).clamp(-1, 1)
