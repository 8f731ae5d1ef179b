"""A folder for what verifications find, since they take longer than what is tested."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verifications")
