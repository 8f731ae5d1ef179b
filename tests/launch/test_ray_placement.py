"""Which rank is where, what is said of a cluster that is too small or not there, and how devices name one. No Ray."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar import LaunchError, ParallelPipeline, PlanError
from patchpar.launch.devices import resolve_devices
from patchpar.launch.local import LocalExecutor
from patchpar.launch.ray.cluster import RayActor
from patchpar.launch.ray.placement import bundles_by_rank, check_resources
from tests.launch.conftest import PLAIN


def test_ranks_of_a_node_follow_each_other_and_the_fullest_node_is_first() -> None:
    nodes = {0: "b", 1: "a", 2: "b", 3: "c", 4: "a", 5: "b"}
    order = bundles_by_rank(nodes)
    assert order == (0, 2, 5, 1, 4, 3)
    assert [nodes[bundle] for bundle in order] == ["b", "b", "b", "a", "a", "c"]


@pytest.mark.parametrize(
    ("number", "total", "says"),
    [
        (8, 4.0, r"devices='ray:8': the Ray cluster has 4 GPUs on 2 nodes, .*: use at most 'ray:4', or add nodes"),
        (1, 0.5, r"has 0.5 GPUs on 2 nodes, and each rank takes one: add nodes"),
    ],
)
def test_a_cluster_that_is_too_small(number: int, total: float, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        check_resources(number, "GPU", total, 2)
    check_resources(int(total), "GPU", total, 2)


def test_devices_on_ray() -> None:
    found = resolve_devices("ray:3")
    assert (found.names, found.are_on_ray, found.note) == (("ray",) * 3, True, "3 ranks on a Ray cluster")
    assert resolve_devices(found.names) == resolve_devices("ray,ray,ray") == found
    assert not resolve_devices("cpu:3").are_on_ray


@pytest.mark.parametrize("devices", ["ray", "ray:", "ray:0", "ray:-1", "ray:x", "ray:1.5"])
def test_devices_that_name_no_number_of_ranks(devices: str) -> None:
    with pytest.raises(PlanError, match=r"'ray:N' means N ranks on a Ray cluster, such as 'ray:8'"):
        resolve_devices(devices)


def test_ray_and_devices_of_this_machine_are_not_mixed() -> None:
    with pytest.raises(PlanError, match="'ray' is not a device"):
        resolve_devices(["cpu", "ray"])
    with pytest.raises(LaunchError, match="'ray:2': this needs devices of this machine, such as 'cpu:2'"):
        LocalExecutor(["ray"] * 2, PLAIN)


def test_without_ray_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch, sdxl_folder: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "ray" else found(name))
    with pytest.raises(PlanError, match=r"which is not installed: pip install 'patchpar\[ray\]'"):
        ParallelPipeline.from_pretrained(sdxl_folder, devices="ray:2")


def test_an_actor_is_not_asked_for_its_end_once_the_program_has_left_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks Ray then connects again, or starts a cluster."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    cluster: Any = None  # it is not asked either
    actor = RayActor(lambda give_up: None, cluster, 0.0)
    assert actor.has_ended()
    assert actor.how_it_ended() == "ended with this program's connection to Ray"
