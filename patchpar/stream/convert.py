"""A released checkpoint of a block-causal transformer made a folder that can be streamed."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import WanTransformer3DModel

from patchpar.errors import PlanError
from patchpar.stream.causal.checkpoint import transformer_of
from patchpar.stream.causal.lora import LoraFile, merge_lora
from patchpar.stream.causal.model_folder import LOADED_BY_US
from patchpar.stream.causal.original_names import as_diffusers
from patchpar.stream.config import CONFIG, StreamConfig
from patchpar.stream.families import family_of
from patchpar.stream.hub import local_folder
from patchpar.stream.model_index import HIGH_NOISE
from patchpar.stream.weight_files import entry_of, read_entries, tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """`entry`: the name under which the checkpoint had the weights, empty if it has nothing else.

    `num_merged`: layers that a LoRA has changed. `config`: None for a model that is not block-causal.
    """

    folder: Path
    family: str
    entry: str
    base: Path
    num_weights: int
    num_merged: int
    config: StreamConfig | None


def convert_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    family: str | None = None,
    lora: str | Path | None = None,
) -> ConvertedModel:
    """Write a folder for StreamingPipeline from the weights of a transformer, in safetensors or a pickle of tensors.

    `base`: a WanPipeline with the other components and the transformer's config.json, by default that of the family.
    `family`: one of FAMILIES; None where the checkpoint says what it is. `lora`: a file to merge, or `PATH:SCALE`.
    Weights keep their dtype. Raises PlanError; UnsupportedModel for weights that do not match.
    """
    source, target = Path(checkpoint).expanduser(), Path(folder).expanduser().absolute()
    merged = None if lora is None else LoraFile.of(lora)
    if target.exists():
        raise PlanError(f"{target} is there already: give a new folder")
    entries = read_entries(source)
    name, found = family_of(family, frozenset(entries))
    entry = entry_of(entries, found.weights)
    weights = as_diffusers(tensors_of(source, entries, entry))
    path, _ = local_folder(base or found.base, {}, besides=LOADED_BY_US)
    transformer = transformer_of(path, HIGH_NOISE, weights)
    config = None if found.stream is None else StreamConfig.of(found.stream)
    num_merged = 0 if merged is None else merge_lora(transformer, merged)
    _write(path, target, transformer, found.stream)
    return ConvertedModel(
        folder=target,
        family=name,
        entry=entry,
        base=path,
        num_weights=sum(x.numel() for x in weights.values()),
        num_merged=num_merged,
        config=config,
    )


def _write(base: Path, target: Path, transformer: WanTransformer3DModel, stream: Mapping[str, Any] | None) -> None:
    """Write the folder under another name first, so that one that is there is whole. Raises PlanError."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(base, partial, copy_function=_link_or_copy, ignore=_other_weights(base))
        transformer.save_pretrained(partial / HIGH_NOISE, safe_serialization=True)
        if stream is not None:
            (partial / CONFIG).write_text(json.dumps(stream, indent=1) + "\n")
        partial.rename(target)
    except OSError as error:
        raise PlanError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _other_weights(base: Path) -> Any:
    """What is not copied: the transformer of the base model, which the checkpoint replaces."""
    return lambda folder, names: [HIGH_NOISE] if Path(folder) == base else []


def _link_or_copy(source: str, target: str) -> None:
    """Link a file of the base model instead of copying gigabytes, where the file system can. Raises OSError."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
