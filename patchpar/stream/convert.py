"""A released checkpoint of a block-causal transformer made a folder that can be streamed."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusers import WanTransformer3DModel
from safetensors import SafetensorError
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.files import path_of
from patchpar.models.speech.features import FOLDER as SPEECH_FOLDER
from patchpar.models.speech.parts import SpeechParts
from patchpar.stream.causal.checkpoint import transformer_of
from patchpar.stream.causal.lora import LoraFile, merge_lora
from patchpar.stream.causal.model_folder import LOADED_BY_US
from patchpar.stream.config import CONFIG, StreamConfig
from patchpar.stream.families import StreamFamily, family_of
from patchpar.stream.model_index import HIGH_NOISE, local_folder
from patchpar.stream.speech_checkpoint import copy_wav2vec2, speech_parts, split_speech, wav2vec2_of
from patchpar.stream.weight_files import as_diffusers, entry_of, read_entries, tensors_of


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
    name, found = family_of(family, frozenset(entries), has_lora=lora is not None)
    entry = entry_of(entries, found.weights)
    weights = tensors_of(source, entries, entry)
    path, _ = local_folder(base or found.base, {}, besides=LOADED_BY_US, unread=(HIGH_NOISE,))
    config = None if found.stream is None else StreamConfig.of(found.stream)
    read = _networks(weights, path, source if source.is_dir() else source.parent, found, config)
    num_merged = 0
    if merged is not None:
        num_merged = merge_lora(read.transformer, replace(merged, alpha=found.lora_alpha), read.speech)
    _write(path, target, read, found.stream)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNetworks:
    """The networks of a checkpoint. `wav2vec2`: the folder of the network that is beside it."""

    transformer: WanTransformer3DModel
    speech: SpeechParts | None = None
    wav2vec2: Path | None = None


def _networks(
    weights: Mapping[str, Tensor], base: Path, beside: Path, family: StreamFamily, config: StreamConfig | None
) -> CheckpointNetworks:
    """Raises PlanError, UnsupportedModel."""
    if not family.hears_speech or config is None:
        return CheckpointNetworks(transformer=transformer_of(base, HIGH_NOISE, as_diffusers(weights)))
    of_transformer, others = split_speech(weights)
    transformer = transformer_of(base, HIGH_NOISE, as_diffusers(of_transformer))
    speech = speech_parts(others, transformer, beside, config.fps)
    return CheckpointNetworks(transformer=transformer, speech=speech, wav2vec2=wav2vec2_of(beside))


def _write(base: Path, target: Path, read: CheckpointNetworks, stream: Mapping[str, Any] | None) -> None:
    """Write the folder under another name first, so that one that is there is whole. Raises PlanError."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(base, partial, copy_function=_link_or_copy, ignore=_other_weights(base))
        read.transformer.save_pretrained(partial / HIGH_NOISE, safe_serialization=True)
        if read.speech is not None:
            read.speech.save(partial / HIGH_NOISE)
        if read.wav2vec2 is not None:
            copy_wav2vec2(read.wav2vec2, partial / SPEECH_FOLDER)
        if stream is not None:
            (partial / CONFIG).write_text(json.dumps(stream, indent=1) + "\n")
        partial.rename(target)
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise PlanError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _other_weights(base: Path) -> Any:
    """What is not copied: the base's transformer and stream.json, which are replaced. Links are written through."""
    return lambda folder, names: [HIGH_NOISE, CONFIG] if Path(folder) == base else []


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
