"""Weights of a Wan transformer under the names of its own code, which models distilled from it keep."""

from collections.abc import Collection, Mapping

from torch import Tensor

PREFIXES = ("model.", "diffusion_model.")
WRAPPER = "_fsdp_wrapped_module."
"""What torch's FSDP puts into the names of what it has trained."""
ORIGINAL = "blocks.0.self_attn.q.weight"


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
