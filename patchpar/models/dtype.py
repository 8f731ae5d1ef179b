"""The dtype of weights, a torch.dtype under the argument name of the installed diffusers version."""

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from packaging.version import Version

NAMES = ("torch_dtype", "dtype")
NAME = NAMES[Version(diffusers.__version__) >= Version("0.42.0")]
"""diffusers warns of the older name from that version on."""


def with_dtype(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of from_pretrained with the dtype, given as text or torch.dtype, as a torch.dtype under `NAME`."""
    kept = {name: value for name, value in options.items() if name not in NAMES}
    dtype = dtype_of(options)
    return kept if dtype is None else {**kept, NAME: dtype}


def dtype_of(options: Mapping[str, Any]) -> Any:
    """Return the dtype in options of from_pretrained; None if there is none."""
    given = [options[name] for name in NAMES if options.get(name) is not None]
    dtype = given[-1] if given else None
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
