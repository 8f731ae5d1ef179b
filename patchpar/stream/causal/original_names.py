"""Weights of a Wan transformer under the names of its own code, which models distilled from it keep."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

PREFIXES = ("base_model.model.", "transformer.", "model.", "diffusion_model.")
"""What checkpoints, and LoRAs of PEFT and diffusers, put before the names."""
WRAPPER = "_fsdp_wrapped_module."
"""What torch's FSDP puts into the names of what it has trained."""
ORIGINAL = "blocks.0.self_attn.q.weight"
OWN = ("self_attn", "cross_attn", "ffn.0", "ffn.2", "time_embedding", "text_embedding", "time_projection", "head.head")
"""Parts of names that Wan's own code has and diffusers has not."""


def without_prefix(name: str) -> str:
    """Return the name of a weight inside the transformer."""
    name = name.replace(WRAPPER, "")
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def are_original(names: Collection[str]) -> bool:
    """Whether these are names of Wan's own code."""
    return any(without_prefix(name) == ORIGINAL for name in names)


def as_diffusers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of any shapes under the names of diffusers' WanTransformer3DModel, by diffusers' converter."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    plain = {without_prefix(name): x for name, x in weights.items()}
    if not are_original(plain):
        return plain
    converted: dict[str, Tensor] = convert_wan_transformer_to_diffusers(plain)
    return converted


def diffusers_modules(names: Collection[str]) -> dict[str, str]:
    """Return the names of modules in diffusers' WanTransformer3DModel, by the given ones, of diffusers or of Wan."""
    plain = {name: without_prefix(name) for name in names}
    return {name: _renamed(bare) if any(part in bare for part in OWN) else bare for name, bare in plain.items()}


def _renamed(module: str) -> str:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    (renamed,) = convert_wan_transformer_to_diffusers({f"{module}.weight": torch.empty(0)})
    return str(renamed).removesuffix(".weight")
