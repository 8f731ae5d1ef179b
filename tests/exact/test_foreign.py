"""Whatever works on the whole image inside a denoiser is seen wherever it comes from: exact or refused, never wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.breadth import first_of
from tests.exact import foreign

FOREIGN = "tests.exact.foreign"
LIMIT = 1e-5


@pytest.mark.parametrize(
    ("kind", "when"),
    first_of(
        [(kind, when) for kind in foreign.PLANTS for when in ("before", "after")],
        ("filter", "before"),
    ),
)
def test_what_is_put_into_a_denoiser_is_checked(ranks: Any, tmp_path: Path, kind: str, when: str) -> None:
    """The verdict on the untouched denoiser, which is known by then, is not that on the changed one."""
    for found in ranks.run(f"{FOREIGN}:found", 2, kind, when, str(tmp_path)):
        assert found["untouched"] <= LIMIT
        if "message" in found:
            assert found["message"].startswith(("VerificationError: ", "UnsupportedModel: ")), found
            assert "cfg=2" in found["message"], found
        else:
            assert found["error"] <= LIMIT < 1e-3 < found["effect"], found


def test_what_a_device_has_no_memory_to_compare_is_compared_at_a_smaller_size(ranks: Any, tmp_path: Path) -> None:
    """And is known from then on."""
    for found in ranks.run(f"{FOREIGN}:found_in_short_memory", 2, "scaled", str(tmp_path)):
        assert max(found["errors"]) <= LIMIT < 1e-3 < found["effect"], found
        _, second, third = found["runs"]
        assert (16, 8) in second
        assert len(third) == 1


REFUSED = {
    "centred": "VerificationError: ",
    "at large sizes": "PlanError: a plain call of UNet2DConditionModel, with which calls that run code of another",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_smaller_call_shows_to_be_wrong_or_does_not_show_is_refused(
    ranks: Any, tmp_path: Path, kind: str
) -> None:
    for found in ranks.run(f"{FOREIGN}:found_in_short_memory", 2, kind, str(tmp_path)):
        assert found["message"].startswith(REFUSED[kind])
