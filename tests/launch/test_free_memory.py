"""Free memory of a host is what the cgroups of this process leave of it: of a container, a Slurm job, or a service."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from patchpar.launch import host_memory
from patchpar.launch.host_memory import free_memory

GB = 10**9
SYSTEM = 64 * GB
UNLIMITED_V1 = 9223372036854771712


def v2(limit: object, used: int, cache: int = 0) -> Mapping[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 1\ninactive_file {cache}\n",
    }


def v1(limit: int, used: int, cache: int = 0) -> Mapping[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"inactive_file 7\ntotal_inactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("own", "groups", "free"),
    [
        ("0::/\n", {"": v2(8 * GB, 3 * GB, GB)}, 6 * GB),  # a container with a namespace of its own
        ("0::/\n", {"": v2("max", 3 * GB)}, SYSTEM),
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7": v2(8 * GB, 2 * GB), "slurm/job_7/step_0": v2("max", GB)}, 6 * GB),
        ("0::/a/b\n", {"a": v2(9 * GB, 0), "a/b": v2(5 * GB, GB)}, 4 * GB),
        ("0::/docker/7\n", {"": v2(8 * GB, 3 * GB)}, 5 * GB),  # a container that sees its own group only
        (
            "4:cpu:/x\n3:memory:/job_7\n",
            {"memory/job_7": v1(8 * GB, 3 * GB, GB), "memory": v1(UNLIMITED_V1, 9)},
            6 * GB,
        ),
        ("3:cpu,memory:/docker/7\n", {"memory": v1(8 * GB, 3 * GB)}, 5 * GB),
        ("3:cpu:/a\n", {"memory/a": v1(8 * GB, 3 * GB)}, SYSTEM),  # another controller's group
        ("0::/a\n", {"a": {"memory.max": "nonsense", "memory.current": "1", "memory.stat": ""}}, SYSTEM),
        ("", {}, SYSTEM),
    ],
)
def test_a_limit_of_a_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, groups: Mapping[str, Mapping[str, str]], free: int
) -> None:
    root, listed = tmp_path / "cgroup", tmp_path / "own"
    listed.write_text(own)
    for name, files in groups.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (root / name / file).write_text(text)
    monkeypatch.setattr(host_memory, "CGROUPS", root)
    monkeypatch.setattr(host_memory, "OWN_GROUPS", listed)
    monkeypatch.setattr(host_memory, "_free_in_system", lambda: SYSTEM)
    assert free_memory() == free


def test_a_system_without_groups_has_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "nothing")
    monkeypatch.setattr(host_memory, "_free_in_system", lambda: SYSTEM)
    assert free_memory() == SYSTEM
