"""A released checkpoint of a block-causal transformer made a folder that can be streamed."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors import SafetensorError
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.files import path_of
from patchpar.models.speech.config import AFTER, SpeechConfig
from patchpar.models.speech.features import FOLDER as SPEECH_FOLDER
from patchpar.models.speech.parts import SpeechParts
from patchpar.models.streaming.checkpoint import check_weights, transformer_of
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.families import SPEECH, StreamFamily, family_of
from patchpar.models.streaming.lora import LoraFile, merge_lora, refuse_lora
from patchpar.models.streaming.stream_folder import LOADED_BY_US
from patchpar.models.streaming.video_folder import CONFIG, HIGH_NOISE, local_folder
from patchpar.models.streaming.weight_files import as_diffusers, entry_of, read_entries, tensors_of, without_prefixes
from patchpar.plan.json_files import read_object

PARTS = ("casual_audio_encoder.", "audio_injector.", "frame_packer.", "cond_encoder.", "trainable_cond_mask.")
WAV2VEC2 = "wav2vec2-large-xlsr-53-english"
"""The folder beside the published weights."""
WANTED = ("config.json", "model.safetensors", "preprocessor_config.json")
FIRST = "casual_audio_encoder.encoder.conv1_local.conv.weight"
POSE = "cond_encoder.weight"
TRAINED: Mapping[str, Any] = {
    "enable_adain": True,
    "adain_mode": "attn_norm",
    "enable_framepack": True,
    "zero_timestep": True,
    "enable_motioner": False,
    "enable_tsm": False,
    "trainable_token_pos_emb": False,
}
"""Fields of a checkpoint's config.json with the only values that are understood, those of the published model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """`entry`: the name under which the checkpoint had the weights, empty if it has nothing else.

    `num_merged`: layers that a LoRA has changed. `config`: None for a model that is not block-causal. `hears_speech`:
    it needs audio and a reference.
    """

    folder: Path
    family: str
    entry: str
    base: Path
    num_weights: int
    num_merged: int
    config: StreamConfig | None
    hears_speech: bool = False


def convert_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    family: str | None = None,
    lora: str | Path | None = None,
) -> ConvertedModel:
    """Write a folder for StreamingPipeline from the weights of a transformer, in safetensors or a pickle of tensors.

    `checkpoint`: a file, or a folder with safetensors, as Wan-S2V is published. `base`: a WanPipeline with the other
    components and the transformer's config.json, by default that of the family. `family`: one of FAMILIES; None where
    the checkpoint says what it is. `lora`: a file to merge, or `PATH:SCALE`. Weights keep their dtype. Raises
    PlanError; UnsupportedModel for weights that do not match.
    """
    source, target = path_of(checkpoint), path_of(folder).absolute()
    merged = None if lora is None else LoraFile.of(lora)
    if target.exists():
        raise PlanError(f"{target} is there already: give a new folder")
    entries = read_entries(source)
    refuse_lora(source, entries)
    name, found = family_of(family, frozenset(entries), has_lora=lora is not None)
    entry = entry_of(entries, found.weights)
    weights = tensors_of(source, entries, entry)
    path, _ = local_folder(base or found.base, {}, besides=LOADED_BY_US, unread=(HIGH_NOISE,))
    config = None if found.stream is None else StreamConfig.of(found.stream)
    networks = _networks(weights, path, source if source.is_dir() else source.parent, found, config)
    num_merged = 0
    if merged is not None:
        num_merged = merge_lora(networks[0], replace(merged, alpha=found.lora_alpha), networks[1])
    _write(path, target, networks, found.stream)
    return ConvertedModel(
        folder=target,
        family=name,
        entry=entry,
        base=path,
        num_weights=sum(x.numel() for x in weights.values()),
        num_merged=num_merged,
        config=config,
        hears_speech=found.hears_speech,
    )


Networks = tuple[WanTransformer3DModel, SpeechParts | None, Path | None]
"""Of a checkpoint: its transformer, its other parts, and the folder of wav2vec2, which is beside it."""


def _networks(
    weights: Mapping[str, Tensor], base: Path, beside: Path, family: StreamFamily, config: StreamConfig | None
) -> Networks:
    """Raises PlanError, UnsupportedModel."""
    if not family.hears_speech or config is None:
        return transformer_of(base, HIGH_NOISE, as_diffusers(weights)), None, None
    plain = without_prefixes(weights)
    others = {name: x for name, x in plain.items() if name.startswith(PARTS)}
    of_transformer = {name: x for name, x in plain.items() if name not in others}
    transformer = transformer_of(base, HIGH_NOISE, as_diffusers(of_transformer))
    return transformer, _speech_parts(others, transformer, beside, config.fps), _wav2vec2_of(beside)


def _write(base: Path, target: Path, networks: Networks, stream: Mapping[str, Any] | None) -> None:
    """Write the folder under another name first, so that one that is there is whole. Raises PlanError."""
    (transformer, speech, wav2vec2), partial = networks, target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        # Not the base's transformer and stream.json, which are replaced: links would be written through.
        replaced = [HIGH_NOISE, CONFIG]
        shutil.copytree(
            base, partial, copy_function=_link_or_copy, ignore=lambda at, _: replaced if Path(at) == base else []
        )
        transformer.save_pretrained(partial / HIGH_NOISE, safe_serialization=True)
        if speech is not None:
            speech.save(partial / HIGH_NOISE)
        if wav2vec2 is not None:
            shutil.copytree(wav2vec2, partial / SPEECH_FOLDER, ignore=lambda _, names: {*names} - {*WANTED})
        if stream is not None:
            (partial / CONFIG).write_text(json.dumps(stream, indent=1) + "\n")
        partial.rename(target)
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise PlanError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    """Link weights of the base model instead of copying gigabytes, where the file system can. Raises OSError.

    Other files are copied: who edits a configuration of the new model would edit that of the base too.
    """
    if not source.endswith(".safetensors"):
        shutil.copy2(source, target)
        return
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


def _speech_parts(
    weights: Mapping[str, Tensor], transformer: WanTransformer3DModel, checkpoint: Path, fps: float
) -> SpeechParts:
    """Return the parts with these weights of any shapes, whose sizes are read from them.

    `checkpoint`: the folder that may have the published config.json. `fps`: images per second. Raises PlanError, and
    UnsupportedModel for weights that do not fit or are not there.
    """
    facts, net = _facts(checkpoint), transformer.config
    absent = sorted({SPEECH, FIRST, POSE} - weights.keys())
    if absent:
        raise UnsupportedModel(f"these weights are not those of Wan-S2V: missing: {', '.join(absent)}")
    for name in (FIRST, POSE):
        if weights[name].dim() < 2:
            raise UnsupportedModel(f"{name} has the shape {tuple(weights[name].shape)}, which is not that of Wan-S2V")
    after = facts.get("audio_inject_layers", list(AFTER))
    if not isinstance(after, list):
        raise UnsupportedModel(f"{checkpoint / 'config.json'}: audio_inject_layers={after!r:.40}: it must be a list")
    dim = net.num_attention_heads * net.attention_head_dim
    config = SpeechConfig(
        dim=dim,
        heads=net.num_attention_heads,
        after=tuple(after),
        layers=weights[SPEECH].numel(),
        features=weights[FIRST].shape[-2],
        tokens=max(1, len(weights[FIRST]) // (dim // 4)),
        channels=weights[POSE].shape[1],
        fps=fps,
    )
    with torch.device("meta"):
        parts = SpeechParts(config)
    check_weights(parts, weights, "the transformer's config.json")
    parts.load_state_dict(dict(weights), assign=True)
    return parts


def _facts(checkpoint: Path) -> Mapping[str, Any]:
    file = checkpoint / "config.json"
    facts = read_object(file) if file.is_file() else {}
    others = [name for name, value in TRAINED.items() if facts.get(name, value) != value]
    if others:
        raise UnsupportedModel(
            f"{file}: {', '.join(f'{name}={facts[name]!r:.40}' for name in others)}: only models with "
            f"{', '.join(f'{name}={TRAINED[name]!r}' for name in others)} are understood"
        )
    return facts


def _wav2vec2_of(checkpoint: Path) -> Path:
    """Return the folder of the wav2vec2 model beside published weights. Raises PlanError if it is not there."""
    folder = checkpoint / WAV2VEC2
    lacks = [name for name in WANTED[:2] if not (folder / name).is_file()]
    if lacks:
        raise PlanError(
            f"{folder} has no {' and no '.join(lacks)}: put the folder of the wav2vec2 model there, which is published "
            "with Wan2.2-S2V-14B"
        )
    return folder
