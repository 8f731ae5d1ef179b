"""What the lowest versions of pyproject.toml do not have yet."""

from typing import Any

import diffusers
import pytest
import torch
from packaging.version import Version

TORCH = Version(torch.__version__)


def needs_class(name: str) -> Any:
    """Leaves a test out where diffusers has no class of this name."""
    return pytest.mark.skipif(
        name not in dir(diffusers), reason=f"diffusers {diffusers.__version__} has no {name}, newer ones do"
    )


def needs_diffusers(version: str, what: str) -> Any:
    """Leaves tests out where diffusers is older than this."""
    old = Version(version) > Version(diffusers.__version__)
    return pytest.mark.skipif(old, reason=f"diffusers before {version} has no {what}")


def needs_torch(version: str, what: str) -> Any:
    """Leaves a test out where torch is older than this."""
    return pytest.mark.skipif(Version(version) > TORCH, reason=f"torch before {version} has no {what}")
