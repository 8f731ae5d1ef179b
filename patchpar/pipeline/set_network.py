"""What may be set in the place of a network."""

from typing import Any

from torch import nn

from patchpar.errors import PlanError
from patchpar.models.info import is_name_of_denoiser, refuse_compiled


def refuse_as_denoiser(name: str, value: Any, *, is_alone: bool) -> None:
    """Raise PlanError if a denoiser is set to what is no network, UnsupportedModel for a compiled one on several ranks.

    None is one: some pipelines have a second denoiser, or not.
    """
    if value is None or not is_name_of_denoiser(name):
        return
    if not isinstance(value, nn.Module):
        raise PlanError(f"pipe.{name} cannot be {value!r:.80}, which is no torch module: set a network in its place")
    if not is_alone:
        refuse_compiled(value)
