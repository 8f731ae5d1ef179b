"""Verdicts are kept by what they depend on, and a broken or missing file only means checking again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchpar.comm.collectives import Communicator
from patchpar.errors import VerificationError
from patchpar.plan.mesh import Axis
from patchpar.shard import verification_cache as module
from patchpar.shard.verification import Comparison, largest_error
from patchpar.shard.verification_cache import VerificationCache

from .threads import on_threads

FACTS = {"denoiser": "UNet2DConditionModel", "config": {"layers": 1}, "bands": 2, "dtype": "torch.float32"}


def test_a_verification_is_found_again(tmp_path: Path) -> None:
    verifications = VerificationCache(tmp_path / "not" / "yet")
    key = verifications.key(FACTS)
    assert verifications.find(key, "relative_error", float) is None
    verifications.remember(key, FACTS, relative_error=1.5e-6)
    assert verifications.find(key, "relative_error", float) == 1.5e-6
    (file,) = (tmp_path / "not" / "yet").iterdir()  # no draft is left beside it
    assert json.loads(file.read_text())["denoiser"] == "UNet2DConditionModel"


@pytest.mark.parametrize("change", [{"bands": 3}, {"config": {"layers": 2}}, {"dtype": "torch.float16"}, {"dim": -1}])
def test_other_facts_are_another_verification(tmp_path: Path, change: dict[str, object]) -> None:
    verifications = VerificationCache(tmp_path)
    assert verifications.key(FACTS | change) != verifications.key(FACTS)
    assert verifications.key(dict(reversed(FACTS.items()))) == verifications.key(FACTS)


def test_other_versions_are_another_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = VerificationCache(tmp_path).key(FACTS)
    monkeypatch.setattr(module, "versions", lambda: {"torch": "99"})
    assert VerificationCache(tmp_path).key(FACTS) != before


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"relative_error": "much"}', '{"relative_error": null}'])
def test_a_broken_file_means_checking_again(tmp_path: Path, text: str) -> None:
    verifications = VerificationCache(tmp_path)
    key = verifications.key(FACTS)
    (tmp_path / f"{key}.json").write_text(text)
    assert verifications.find(key, "relative_error", float) is None
    verifications.remember(key, FACTS, relative_error=2e-6)
    assert verifications.find(key, "relative_error", float) == 2e-6


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the home folder of another user, which a container has been given."""

    def refused(path: Path, **_: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    verifications = VerificationCache(tmp_path)
    key = verifications.key(FACTS)
    verifications.remember(key, FACTS, relative_error=1e-6)
    monkeypatch.setattr(Path, "stat", refused)
    assert verifications.find(key, "relative_error", float) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    verifications = VerificationCache(tmp_path / "file" / "folder")
    verifications.remember(verifications.key(FACTS), FACTS, relative_error=1e-6)
    assert verifications.find(verifications.key(FACTS), "relative_error", float) is None


def test_a_full_disk_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would leave another one. What was found before stays. Control: on a disk with room it is new."""
    verifications = VerificationCache(tmp_path)
    key = verifications.key(FACTS)
    verifications.remember(key, FACTS, relative_error=1e-6)

    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        verifications.remember(key, FACTS, relative_error=2e-6)
    assert [each.name for each in tmp_path.iterdir()] == [f"{key}.json"]
    assert verifications.find(key, "relative_error", float) == 1e-6
    verifications.remember(key, FACTS, relative_error=2e-6)
    assert verifications.find(key, "relative_error", float) == 2e-6


def test_a_user_without_a_home_keeps_no_verifications(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    verifications = VerificationCache.of(verify=True)
    assert verifications is not None, "checks go on"
    key = verifications.key(FACTS)
    verifications.remember(key, FACTS, relative_error=1.5e-6)
    assert verifications.find(key, "relative_error", float) is None


def test_all_ranks_refuse_what_one_finds() -> None:
    """Together, with its figures, and before any of them makes the next comparison."""
    made = []

    def compared(rank: int) -> Iterator[list[Comparison]]:
        for number in range(3):
            made.append((rank, number))
            yield [Comparison(2e-6, 1e-4), Comparison(0.5 if (rank, number) == (1, 1) else 1e-6, 1e-4)]

    def on_rank(transport: Any) -> float:
        mesh = (Communicator(transport), Axis("patch", transport.rank, 2, (0, 1)))
        return largest_error(mesh, compared(transport.rank), "this model", ": use another plan")

    for found in on_threads(2, on_rank):
        assert isinstance(found, VerificationError)
        assert "this model differs from the plain one by 2.0e-06, 5.0e-01, more than the 1e-04" in str(found)
        assert str(found).endswith(": use another plan")
    assert sorted(made) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_largest_error_is_of_all_ranks() -> None:
    def on_rank(transport: Any) -> float:
        mesh = (Communicator(transport), Axis("patch", transport.rank, 2, (0, 1)))
        return largest_error(mesh, [[Comparison(0.1 * transport.rank, 1.0)], [Comparison(0.05, 1.0)]], "this model")

    assert on_threads(2, on_rank) == pytest.approx([0.1, 0.1])
