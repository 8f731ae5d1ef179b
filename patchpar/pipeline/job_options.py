"""What `submit` may be given beside the arguments of the pipeline. Does not import torch, so that a caller need not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchpar.errors import PlanError
from patchpar.pipeline.messages import Previews
from patchpar.plan.scalars import is_number

if TYPE_CHECKING:
    from patchpar.pipeline.suspended_call import SuspendedCall  # imports what starts workers, which ranks need not

Adapters = tuple[tuple[str, float], ...]
"""Names of adapters in order, and their scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Who gets latents, an earlier call to go on with, and the adapters that act; None for the pipeline's."""

    previews: Previews | None = None
    resume: SuspendedCall | None = None
    adapters: Adapters | None = None


def checked_adapters(adapters: Mapping[str, float] | None) -> Adapters | None:
    """Return adapters of an argument in a fixed order. Raises PlanError for what is no name or no finite scale."""
    if adapters is None:
        return None
    if not isinstance(adapters, Mapping):
        raise PlanError(f"adapters={adapters!r}: give scales by name, such as {{'ink': 0.8}}, or {{}} for none")
    for name, scale in adapters.items():
        if not isinstance(name, str) or not is_number(scale) or not math.isfinite(scale):
            raise PlanError(f"adapters={dict(adapters)!r}: the scale of {name!r} must be a finite number")
    return tuple(sorted((name, float(scale)) for name, scale in adapters.items()))
