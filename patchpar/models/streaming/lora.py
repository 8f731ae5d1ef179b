"""A LoRA merged into the weights of a transformer: W + scale * alpha / rank * B A (arXiv:2106.09685, section 4.1).

    PEFT          base_model.model.blocks.0.self_attn.q.lora_A.weight     alpha in adapter_config.json
    diffusers     transformer.blocks.0.attn1.to_q.lora_A.weight           alpha in the metadata of the file
    others        diffusion_model.blocks.0.self_attn.q.lora_down.weight   alpha in the file

Modules have the names of diffusers or of Wan's own code. Where alpha is in none of these places it is the rank.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.files import path_of
from patchpar.models.streaming.weight_files import diffusers_modules, entry_of, first_names, read_entries, tensors_of
from patchpar.plan.json_fields import number
from patchpar.plan.json_files import object_of, read_object

LORA = "lora"
"""The option with a LoRA to merge, `PATH:SCALE`, beside those of diffusers' from_pretrained."""
ENTRIES = ("generator_lora", "state_dict")
"""Names under which a checkpoint has a LoRA; the first is LongLive's."""
FACTOR = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(\.default)?\.weight")
ALPHA = re.compile(r"(.+)\.alpha")
DOWN = ("lora_A", "lora_down", "lora.down")
CONFIG = "adapter_config.json"
METADATA = "lora_adapter_metadata"
LARGEST_ALPHA = 2.0**16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """A LoRA to merge with the factor `scale`. `alpha`: where the file names none; None for the rank."""

    path: Path
    scale: float = 1.0
    alpha: float | None = None

    @classmethod
    def of(cls, text: str | Path) -> "LoraFile":
        """Parse `PATH` or `PATH:SCALE`. Raises PlanError for a file that is not there, or a scale that is no number."""
        name, colon, factor = str(text).rpartition(":")
        if not colon or path_of(text).is_file():
            name, factor = str(text), "1"
        path = path_of(name).absolute()
        try:
            scale = float(factor)
        except ValueError:
            scale = math.nan
        if not math.isfinite(scale):
            raise PlanError(f"lora={str(text)!r}: {factor!r} is no scale; write PATH or PATH:0.5")
        if not path.is_file():
            raise PlanError(f"lora={str(text)!r}: {path} is no file; write PATH or PATH:0.5")
        return cls(path=path, scale=scale)

    def __str__(self) -> str:
        return f"{self.path}:{self.scale:g}"


def refuse_lora(file: Path, entries: Mapping[str, Any]) -> None:
    """Raise PlanError for a checkpoint of which all weights are factors of a LoRA."""
    parts = [x for x in entries.values() if isinstance(x, Mapping)] or [entries]
    if all(any(FACTOR.fullmatch(str(name)) for name in part) for part in parts):
        raise PlanError(f"{file} is a LoRA: give it with --lora, and the model's weights as the checkpoint")


@torch.no_grad()
def merge_lora(transformer: nn.Module, lora: LoraFile, beside: nn.Module | None = None) -> int:
    """Add a LoRA to the weights of `transformer`, which keep their dtypes; returns the number of changed layers.

    `beside`: a module with further layers that it may change, under names of their own. Raises UnsupportedModel, with
    nothing changed, for weights that do not fit; PlanError for a file that cannot be read.
    """
    weights, changed = _fitting(transformer, lora, beside)
    of_all = _alpha_of(lora.path)
    of_all = lora.alpha if of_all is None else of_all
    for layer, names in changed:
        weight: Any = layer.weight
        down, up = weights[names["down"]], weights[names["up"]]
        alpha = float(weights[names["alpha"]]) if "alpha" in names else of_all
        factor = lora.scale * (len(down) if alpha is None else alpha) / len(down)
        weight.copy_(weight.float() + (factor * (up.float() @ down.float())).to(weight.device))
    return len(changed)


def check_lora(transformer: nn.Module, lora: LoraFile, beside: nn.Module | None = None) -> None:
    """Raise what `merge_lora` would raise. Layers of `transformer` and `beside` may be on the meta device."""
    _fitting(transformer, lora, beside)
    _alpha_of(lora.path)


def _fitting(
    transformer: nn.Module, lora: LoraFile, beside: nn.Module | None
) -> tuple[dict[str, Tensor], list[tuple[Any, dict[str, str]]]]:
    """Return the weights of a LoRA, and for each layer that it changes the names of its own. Raises PlanError."""
    entries = read_entries(lora.path)
    weights = tensors_of(lora.path, entries, entry_of(entries, ENTRIES))
    by_module = _names_by_module(lora.path, weights)
    renamed = diffusers_modules(by_module)
    layers = dict(transformer.named_modules()) | dict(() if beside is None else beside.named_modules())
    for module, names in by_module.items():
        _check(lora.path, weights, names, layers.get(renamed[module]))
    return weights, [(layers[renamed[module]], names) for module, names in by_module.items()]


def _names_by_module(file: Path, weights: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """The names of the matrices `down` [rank, in] and `up` [out, rank] of each module, and of its `alpha`, if any."""
    found: dict[str, dict[str, str]] = {}
    unknown = list[str]()
    for name, x in weights.items():
        if match := FACTOR.fullmatch(name):
            found.setdefault(match[1], {})["down" if match[2] in DOWN else "up"] = name
        elif (match := ALPHA.fullmatch(name)) and x.numel() == 1 and 0 <= float(x) <= LARGEST_ALPHA:
            found.setdefault(match[1], {})["alpha"] = name
        else:
            unknown.append(name)
    halves = [module for module, names in found.items() if not {"down", "up"} <= names.keys()]
    if unknown or halves or not found:
        what = f"what is no LoRA: {first_names(unknown)}" if unknown else f"half a LoRA: {first_names(halves)}"
        raise UnsupportedModel(
            f"{file} has {what if unknown or halves else 'no LoRA'}: give matrices lora_A and lora_B (or lora_down and "
            "lora_up) of linear layers"
        )
    return found


def _check(file: Path, weights: Mapping[str, Tensor], names: Mapping[str, str], layer: nn.Module | None) -> None:
    if not isinstance(layer, nn.Linear):
        raise UnsupportedModel(
            f"{file}: {names['down']} belongs to no linear layer of this transformer: was it made for it?"
        )
    out, inside = layer.weight.shape
    down, up = (tuple(weights[names[half]].shape) for half in ("down", "up"))
    if len(down) != 2 or not down[0] or down[1] != inside or up != (out, down[0]):
        raise UnsupportedModel(
            f"{file}: {', '.join(names.values())} have shapes {down} and {up}, but this layer takes (rank, {inside}) "
            f"and ({out}, rank): was it made for this transformer?"
        )


def _alpha_of(file: Path) -> float | None:
    """The alpha that holds for all layers, from beside the weights. Raises PlanError."""
    facts: Mapping[str, Any] = {}
    if (file.parent / CONFIG).is_file():
        facts = read_object(file.parent / CONFIG)
    elif file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as stream:
            text = (stream.metadata() or {}).get(METADATA, "{}")
        facts = object_of(text, f"{file}: {METADATA}")
        facts = {name.rpartition(".")[2]: value for name, value in facts.items()}
    if facts.get("use_rslora") or facts.get("use_dora") or facts.get("alpha_pattern"):
        kind = json.dumps({name: facts[name] for name in ("use_rslora", "use_dora", "alpha_pattern") if name in facts})
        raise PlanError(f"{file}: this kind of LoRA is not merged here: {kind:.200}")
    alpha = facts.get("lora_alpha")
    return None if alpha is None else number("lora_alpha", alpha, 0, LARGEST_ALPHA)
