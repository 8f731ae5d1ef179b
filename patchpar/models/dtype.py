"""The number format of weights, as the installed diffusers takes it: torch's, under the name of that version."""

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from packaging.version import Version

NAMES = ("torch_dtype", "dtype")
NAME = NAMES[Version(diffusers.__version__) >= Version("0.42.0")]
"""diffusers warns of the older name from then on."""


def with_dtype(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of from_pretrained with the dtype as torch's, whether it was a text or torch's, under `NAME`."""
    kept = {name: value for name, value in options.items() if name not in NAMES}
    dtype = dtype_of(options)
    return kept if dtype is None else {**kept, NAME: dtype}


def dtype_of(options: Mapping[str, Any]) -> Any:
    """The dtype among options of from_pretrained; None where there is none."""
    given = [options[name] for name in NAMES if options.get(name) is not None]
    dtype = given[-1] if given else None
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
