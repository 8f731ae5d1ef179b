"""Loading the parts of a Wan model that one rank needs, from a folder with weights in the naming of diffusers.

Folders of causal models name classes that diffusers does not have: a `CausalWanTransformer3DModel` with the weights of
a `WanTransformer3DModel`, and a custom scheduler. Streams need neither class, so that the class names are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors import safe_open
from torch import Tensor, nn

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.loading import MALFORMED, dtype_of, load_pipeline, with_dtype
from patchpar.models.speech.parts import CONFIG as SPEECH_FILE
from patchpar.models.speech.parts import SpeechParts, align_weights
from patchpar.models.streaming.causal.audio_conditioner import CONFIG as AUDIO_FILE
from patchpar.models.streaming.causal.audio_conditioner import AudioConditioner
from patchpar.models.streaming.lora import LORA, LoraFile, check_lora, merge_lora
from patchpar.models.streaming.video_folder import HIGH_NOISE, LOW_NOISE, low_noise_below, read_index
from patchpar.models.streaming.weight_files import are_original, as_diffusers, first_names, read_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredWeights:
    """Parts of a model that a rank needs. `transformers`: their names; if empty, the first without weights."""

    text: bool
    vae: bool
    transformers: tuple[str, ...] = (HIGH_NOISE,)

    def spared(self) -> dict[str, Any]:
        """Return options of from_pretrained that leave out the scheduler and what is not needed."""
        names = ["scheduler", *([] if self.text else ["tokenizer", "text_encoder"]), *([] if self.vae else ["vae"])]
        return dict.fromkeys(names)


def load_wan(
    folder: Path, needs: RequiredWeights, options: Mapping[str, Any], beside: nn.Module | None = None
) -> WanPipeline:
    """Load a WanPipeline on the CPU, with None for parts that are not needed. `beside`: see merge_lora.

    Raises PlanError, UnsupportedModel.
    """
    _refuse_others(folder)
    options = {name: value for name, value in options.items() if value is not None}
    lora = LoraFile.of(options.pop(LORA)) if LORA in options else None
    options = with_dtype(options)
    spared = needs.spared() | dict.fromkeys((HIGH_NOISE, LOW_NOISE))
    pipe = load_pipeline(str(folder), options | spared, kind=WanPipeline)
    parts: dict[str, Any] = {part: load_transformer(folder, part, options) for part in needs.transformers}
    if lora is not None:
        for part in parts.values():
            merge_lora(part, lora, beside)
    parts = parts or {HIGH_NOISE: hollow_transformer(WanTransformer3DModel, folder, options)}
    pipe.register_modules(**parts, scheduler=FlowMatchEulerDiscreteScheduler())  # not used by streams
    return pipe


def hearing_of(folder: Path, *, has_weights: bool = True) -> AudioConditioner | SpeechParts | None:
    """Return what a model hears with, on the CPU; None if it takes no audio. `has_weights`: or, if large, without them.

    Raises PlanError.
    """
    if (folder / HIGH_NOISE / AUDIO_FILE).is_file():
        return AudioConditioner.load(folder / HIGH_NOISE)
    if not (folder / HIGH_NOISE / SPEECH_FILE).is_file():
        return None
    return SpeechParts.load(folder / HIGH_NOISE) if has_weights else SpeechParts.hollow(folder / HIGH_NOISE)


def check_lora_fits(folder: Path, lora: LoraFile) -> None:
    """Raise UnsupportedModel for a LoRA of another model, and PlanError for a bad file, without loading the model."""
    if low_noise_below(folder) is not None:
        raise UnsupportedModel(f"lora={str(lora)!r}: this model has two transformers, and a LoRA belongs to one")
    hollow = hollow_transformer(WanTransformer3DModel, folder, {})
    check_lora(hollow, lora, hearing_of(folder, has_weights=False))


def load_transformer(folder: Path, part: str, options: Mapping[str, Any]) -> WanTransformer3DModel:
    """Load a transformer from `folder / part`, from safetensors only. Raises PlanError, UnsupportedModel."""
    _check_config(folder, part)
    if (original := _original_weights(folder / part)) is not None:
        weights = _cast(as_diffusers(original), dtype_of(options) or torch.float32)
        loaded: Any = transformer_of(folder, part, weights)
        align_weights(loaded)
        return loaded.eval()
    try:
        loaded, info = WanTransformer3DModel.from_pretrained(
            str(folder), subfolder=part, use_safetensors=True, output_loading_info=True, **options
        )
    except MALFORMED as error:  # also for weights of another shape
        raise UnsupportedModel(f"{folder / part} cannot be loaded by diffusers: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise UnsupportedModel(
                f"{folder / part} does not match its config.json: {what.replace('_', ' ')} {first_names(info[what])}. "
                "Give weights in the naming of diffusers' WanTransformer3DModel, or of Wan's own code"
            )
    align_weights(loaded)
    return loaded.eval()


def _check_config(folder: Path, part: str) -> None:
    if not (folder / part / "config.json").is_file():
        raise PlanError(f"{folder} has no {part}/config.json: give the folder of a WanPipeline")


def transformer_of(folder: Path, part: str, weights: Mapping[str, Tensor]) -> WanTransformer3DModel:
    """Return the transformer that `folder / part / config.json` describes, with these weights of any shapes.

    Raises PlanError where it is not there, UnsupportedModel for weights that do not fit.
    """
    _check_config(folder, part)
    with init_empty_weights(include_buffers=False):
        transformer: Any = WanTransformer3DModel.from_config(
            WanTransformer3DModel.load_config(str(folder), subfolder=part)
        )
    check_weights(transformer, weights, str(folder / part / "config.json"))
    transformer.load_state_dict(dict(weights), assign=True)
    loaded: WanTransformer3DModel = transformer
    return loaded


def check_weights(module: nn.Module, weights: Mapping[str, Tensor], described: str) -> None:
    """Raise UnsupportedModel, with names, unless weights of any shapes are those that `module` takes.

    `described`: where its sizes come from.
    """
    wanted = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    given = {name: tuple(x.shape) for name, x in weights.items()}
    for what, names in (
        ("missing", wanted.keys() - given.keys()),
        ("unexpected", given.keys() - wanted.keys()),
        ("of another shape", {name for name in wanted.keys() & given.keys() if wanted[name] != given[name]}),
    ):
        if names:
            raise UnsupportedModel(
                f"these weights do not fit {described}: {what}: {first_names(names)}. Give the configuration of the "
                "model that they were distilled from"
            )
    if whole := [name for name, x in weights.items() if not x.is_floating_point()]:
        raise UnsupportedModel(f"weights of whole numbers are quantised: {first_names(whole)}. Give them as floats")


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Cast weights of any shapes as diffusers' from_pretrained does, which keeps some modules in float32."""
    kept = set(WanTransformer3DModel._keep_in_fp32_modules or ())
    return {name: x.to(torch.float32 if kept.intersection(name.split(".")) else dtype) for name, x in weights.items()}


def _original_weights(folder: Path) -> dict[str, Tensor] | None:
    """The weights of a folder if they have the names of Wan's own code, else None. Raises PlanError."""
    names = list[str]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stream:
            names += stream.keys()
    return read_entries(folder) if are_original(names) else None


def hollow_transformer(kind: type[Any], folder: Path, options: Mapping[str, Any]) -> Any:
    """Return a transformer of this class on the meta device, for a rank that does not denoise."""
    config = kind.load_config(str(folder), subfolder=HIGH_NOISE)
    with torch.device("meta"):
        hollow = kind.from_config(config)
    return nn.Module.to(hollow, dtype_of(options) or torch.float32)  # diffusers' own `to` warns when it casts weights


def _refuse_others(folder: Path) -> None:
    vae = read_index(folder).get("vae")
    if isinstance(vae, list) and vae[-1] not in (None, "AutoencoderKLWan"):
        raise UnsupportedModel(
            f"this model's {vae[-1]} cannot decode block by block: use one with AutoencoderKLWan, such as Wan 2.1"
        )
