"""diffusers' step caches beside structure guidance: what they keep of one patch is of no use to the next."""

from __future__ import annotations

import pytest
from diffusers import FirstBlockCacheConfig

from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.options import StructureGuidance
from tests.tiny import build

from .generation import large


def test_they_are_refused_until_they_are_disabled() -> None:
    tiny, strategy = build("flux"), StructureGuidance(native=64)
    tiny.denoiser.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    words = r"FirstBlockCacheConfig skips blocks by what .*is of another patch.*use disable_cache\(\)"
    with pytest.raises(UnsupportedModel, match=words), large(tiny, strategy, None, Axis("patch")):
        pass
    tiny.denoiser.disable_cache()
    with large(tiny, strategy, None, Axis("patch")) as found:
        assert found.native.size
