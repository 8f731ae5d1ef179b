"""Code in a denoiser that does something else in later steps: exact or refused in that step, never wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.breadth import first_of
from tests.exact.later import FIRST_WITH_EFFECT, TIMES

FOUND = "tests.exact.later:found"
LIMIT = 1e-5
MIXING = ["counted", "hook", "by time", "by factor", "by tensor"]
HARMLESS = {
    "pointwise": True,
    "in turn": True,
    "reused": False,
    "smoothed": False,
    "processor": False,
    "skipped blocks": False,
}
"""Whether each step computes what none before did, so that each is compared."""
BOTH = ("unet", "tokens")


@pytest.mark.parametrize(
    ("kind", "name", "when"),
    first_of(
        [
            (kind, name, when)
            for kind in BOTH
            for name in MIXING
            for when in ("before", "after")
            if (kind, name) != ("tokens", "by time")  # whose times are below one: it acts from the first step on
        ],
        ("unet", "by factor", "before"),
        ("tokens", "counted", "after"),
    ),
)
def test_what_mixes_positions_from_some_step_on_is_refused_in_that_step(
    ranks: Any, tmp_path: Path, kind: str, name: str, when: str
) -> None:
    for found in ranks.run(FOUND, 2, kind, name, str(tmp_path), when):
        assert found["step"] == FIRST_WITH_EFFECT, found
        assert found["message"].startswith("VerificationError: "), found
        assert "tests.exact.later" in found["message"]
        assert "use plan cfg=2" in found["message"]
        assert max(found["errors"]) <= LIMIT


@pytest.mark.parametrize(
    ("kind", "name", "when"),
    first_of(
        [
            (kind, name, when)
            for kind in BOTH
            for name in HARMLESS
            for when in ("before", "after")
            if (kind, name) != ("tokens", "skipped blocks")
        ],
        ("unet", "skipped blocks", "before"),
    ),
)
def test_what_does_not_is_exact_in_every_step(ranks: Any, tmp_path: Path, kind: str, name: str, when: str) -> None:
    """The second image too, in which a call is not compared unless it does something new."""
    for found in ranks.run(FOUND, 2, kind, name, str(tmp_path), when):
        assert max(found["errors"]) <= LIMIT < 1e-3 < found["effect"], found
        second = found["calls"][len(TIMES) :]
        assert second == [2 if HARMLESS[name] else 1] * len(TIMES), found


@pytest.mark.breadth
@pytest.mark.parametrize("kind", BOTH)
def test_with_stale_values_a_step_is_compared_with_fresh_ones(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Which leaves the stale ones as they are: errors are those of a run in which nothing is compared."""
    strategy = "displaced:warmup_steps=1"
    for found in ranks.run(FOUND, 2, kind, "by factor", str(tmp_path), "before", strategy):
        assert found["step"] == FIRST_WITH_EFFECT, found
        assert found["message"].startswith("VerificationError: ")
    watched, trusted = (
        ranks.run(FOUND, 2, kind, "pointwise", str(tmp_path), "before", strategy, names) for names in ([], ["tests"])
    )
    for one, other in zip(watched, trusted, strict=True):
        assert one["errors"] == other["errors"], (one, other)
        assert sum(one["calls"]) > sum(other["calls"])
        assert max(one["errors"]) > 1e-3


@pytest.mark.breadth
def test_blocks_that_are_skipped_beside_stale_values(ranks: Any, tmp_path: Path) -> None:
    """Nothing waits for a message that is not sent, and what is approximate stays so."""
    for found in ranks.run(FOUND, 2, "unet", "skipped blocks", str(tmp_path), "before", "displaced:warmup_steps=1"):
        assert "message" in found or 1e-4 < max(found["errors"]) < 0.2, found


def test_without_comparisons_in_later_steps_it_is_wrong(ranks: Any, tmp_path: Path) -> None:
    """Negative control: trusted by name, which is the user's word that it does the same in every step."""
    for found in ranks.run(FOUND, 2, "unet", "counted", str(tmp_path), "before", "exact", ["tests.exact"], 1):
        assert max(found["errors"][:FIRST_WITH_EFFECT]) <= LIMIT
        assert min(found["errors"][FIRST_WITH_EFFECT:]) > 1e-3


@pytest.mark.parametrize(
    ("name", "words"), [("generator", "keeps a generator"), ("written", "writes into tensors that it keeps")]
)
def test_what_cannot_be_put_back_is_refused_in_words(ranks: Any, tmp_path: Path, name: str, words: str) -> None:
    for found in ranks.run(FOUND, 2, "unet", name, str(tmp_path)):
        assert found["step"] == 0
        assert found["message"].startswith("UnsupportedModel: ")
        assert words in found["message"], found


def test_what_steps_kept_that_were_not_compared_cannot_be_compared_later(ranks: Any, tmp_path: Path) -> None:
    for found in ranks.run(FOUND, 2, "unet", "smoothed, then more", str(tmp_path)):
        assert found["step"] == len(TIMES) - 1, found
        assert found["message"].startswith("UnsupportedModel: ")
        assert "keeps tensors of this rank's part from one call to the next" in found["message"], found
        assert max(found["errors"]) <= LIMIT


@pytest.mark.parametrize(
    ("degrees", "refused_by"), [({"tensor": 2}, "tensor=2"), ({"stage": 2}, "stage=2")], ids=["tensor", "stage"]
)
def test_where_weights_are_divided_it_is_refused_by_name(
    ranks: Any, tmp_path: Path, degrees: dict[str, int], refused_by: str
) -> None:
    """There no rank could run the plain call in a later step."""
    for message in ranks.run("tests.exact.later:divided", 2, next(iter(degrees)), str(tmp_path)):
        assert message.startswith("UnsupportedModel: FluxTransformer2DModel holds code of another library or your own")
        assert refused_by in message
        assert "trusted_code=[...]" in message
