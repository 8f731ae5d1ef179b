"""The parts of a Wan model that one rank needs, from a folder in the naming of diffusers, whoever wrote it.

Causal models are written by several programs, which name classes that diffusers does not have: a
`CausalWanTransformer3DModel` of the very weights of a `WanTransformer3DModel`, a scheduler of their own. Streams need
neither class, so that parts are loaded by what they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import nn

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.dtype import dtype_of, with_dtype
from patchpar.models.loading import load_pipeline
from patchpar.stream.model_index import HIGH_NOISE, LOW_NOISE, read_index


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredWeights:
    """What a rank has to hold of a model. `transformers`: which; of none only the shapes of the first are made."""

    text: bool
    vae: bool
    transformers: tuple[str, ...] = (HIGH_NOISE,)


def load_wan(folder: Path, needs: RequiredWeights, options: Mapping[str, Any]) -> WanPipeline:
    """A WanPipeline with None for what is not needed, on the CPU. Raises PlanError, UnsupportedModel."""
    _refuse_others(folder)
    spared: dict[str, Any] = {} if needs.text else {"tokenizer": None, "text_encoder": None}
    if not needs.vae:
        spared["vae"] = None
    spared |= dict.fromkeys((HIGH_NOISE, LOW_NOISE, "scheduler"))
    options = with_dtype({name: value for name, value in options.items() if value is not None})
    pipe = load_pipeline(str(folder), options | spared, kind=WanPipeline)
    parts: dict[str, Any] = {part: load_transformer(folder, part, options) for part in needs.transformers}
    parts = parts or {HIGH_NOISE: hollow_transformer(WanTransformer3DModel, folder, options)}
    pipe.register_modules(**parts, scheduler=FlowMatchEulerDiscreteScheduler())  # of which a stream needs nothing
    return pipe


def load_transformer(folder: Path, part: str, options: Mapping[str, Any]) -> WanTransformer3DModel:
    """Weights in the naming of diffusers, from `folder / part`. Raises PlanError, UnsupportedModel."""
    if not (folder / part / "config.json").is_file():
        raise PlanError(f"{folder} has no {part}/config.json: give the folder of a WanPipeline")
    loaded, info = WanTransformer3DModel.from_pretrained(
        str(folder), subfolder=part, use_safetensors=True, output_loading_info=True, **options
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise UnsupportedModel(
                f"{folder / part} is not what its config.json says: {what.replace('_', ' ')} {_first(info[what])}. "
                "Weights are wanted in the naming of diffusers' WanTransformer3DModel"
            )
    return loaded.eval()


def hollow_transformer(kind: type[Any], folder: Path, options: Mapping[str, Any]) -> Any:
    """Shapes without weights of a transformer of this class, for a rank that generates nothing."""
    config = kind.load_config(str(folder), subfolder=HIGH_NOISE)
    with torch.device("meta"):
        hollow = kind.from_config(config)
    return nn.Module.to(hollow, dtype_of(options) or torch.float32)  # diffusers' own warns of weights that it casts


def _refuse_others(folder: Path) -> None:
    vae = read_index(folder).get("vae")
    if isinstance(vae, list) and vae[-1] not in (None, "AutoencoderKLWan"):
        raise UnsupportedModel(f"a {vae[-1]} cannot decode block by block: AutoencoderKLWan can")


def _first(names: Any) -> str:
    listed = sorted(map(str, names))
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
