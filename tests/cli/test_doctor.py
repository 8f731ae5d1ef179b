"""`patchpar doctor`: it starts real workers, and says so when they cannot work together."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patchpar.cli import gpu_facts
from patchpar.cli.doctor import collective_test, versions
from patchpar.cli.gpu_facts import gpu_software, graphics_cards, lacks, will_use
from patchpar.comm.kernels import triton_check
from patchpar.errors import PlanError, WorkerDied
from patchpar.launch.local import LocalExecutor
from patchpar.launch.start_method import resolve_start_method
from patchpar.models.files import embedded_model, resolve_model
from tests.launch.fake_gpus import FakeGpus, pretend
from tests.unit.test_model_folder import in_cache


def test_two_workers_add_up() -> None:
    found = collective_test(["cpu"])
    assert found["error"] is None
    assert found["ok"]
    assert found["devices"] == ["cpu", "cpu"]
    assert found["start"] == resolve_start_method("auto", ["cpu"]).note


@pytest.mark.parametrize("answer", [[1, 0], [2, 2]])
def test_a_wrong_sum_is_a_failure(monkeypatch: pytest.MonkeyPatch, answer: list[int]) -> None:
    monkeypatch.setattr(LocalExecutor, "call", lambda *_: answer)
    found = collective_test(["cpu"])
    assert not found["ok"]
    assert str(answer) in found["error"]


def test_json(fake: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalExecutor, "call", lambda *_: [1, 1])
    result = run("doctor", "--devices", "cpu:2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {"versions", "host", "devices", "gpu", "links", "collective", "memory", "plan"}
    assert found["plan"]["chosen"] == "cfg=2"
    assert found["memory"]["weights"]["unet"] > 0
    assert set(found["memory"]["activations"]) == {"encode", "denoise", "decode"}
    plans = {each["plan"]: each for each in found["memory"]["plans"]}
    whole, hosted = plans["patch=2,strategy=exact"], plans["patch=2,weights=hosted,strategy=exact"]
    assert max(whole["ranks"]) > max(hosted["ranks"])
    assert hosted["host"] > 0 == whole["host"]
    assert plans["patch=2,strategy=fresh-edges"]["kept"] > 0 == whole["kept"]
    assert found["host"]["cores"] >= 1
    assert fake.opened[0].closed


def test_the_test_of_communication_has_the_deadline_of_the_flag(
    fake: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    monkeypatch.setattr(LocalExecutor, "call", lambda workers, *_: found.append(workers._deadline) or [1, 1])
    assert run("doctor", "--devices", "cpu:2", "--deadline", "7", "--json").exit_code == 0
    assert found == [7.0]


def test_text_says_what_fails_and_exits_with_1(fake: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any) -> None:
        raise WorkerDied("rank 1 (cpu) died with exit code -9")

    monkeypatch.setattr(LocalExecutor, "call", dies)
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAILS: rank 1 (cpu) died with exit code -9" in result.stdout
    assert "guidance is on and there are two devices" in result.stdout
    assert resolve_start_method("auto", ["cpu"]).note in result.stdout


def test_a_model_that_does_not_fit(fake: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes, by plan, is there all the same, for weights in the dtype that was asked for."""
    monkeypatch.setattr(LocalExecutor, "call", lambda *_: [1, 1])
    monkeypatch.setattr(fake, "error", PlanError("no plan for 2 devices has room for the weights"))
    result = run("doctor", "--devices", "cpu:2", "--dtype", "bfloat16", "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["plan"]["chosen"] is found["plan"]["ran"] is None
    assert found["plan"]["why"] == "PlanError: no plan for 2 devices has room for the weights"
    assert fake.opened[0].options["torch_dtype"] == "bfloat16"
    folder = resolve_model("embedded", {})[2]
    assert folder is not None
    assert sum(found["memory"]["weights"].values()) == pytest.approx(2 * folder.num_weights, rel=0.01)
    text = run("doctor", "--devices", "cpu:2").stdout
    assert "patch=2,weights=hosted" in text
    assert "embedded: PlanError: no plan for 2 devices has room" in text


def test_a_name_of_the_hub_has_the_memory_of_its_folder(
    fake: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalExecutor, "call", lambda *_: [1, 1])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    in_cache(embedded_model(), tmp_path)
    found = json.loads(run("doctor", "--model", "org/model", "--variant", "fp16", "--json").stdout)
    assert found["memory"]["weights"]["unet"] > 0


def test_devices_that_do_not_exist(fake: Any, run: Any) -> None:
    result = run("doctor", "--devices", "tpu:0")
    assert result.exit_code == 2
    assert "'tpu:0' is not a device" in result.stderr


def test_versions() -> None:
    assert versions()["torch"] not in ("", "missing")


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of an NVIDIA machine, of which one can address the other."""
    gpus = pretend(monkeypatch, FakeGpus(["A", "B"]))
    for name, answer in {
        "mem_get_info": (5, 80),
        "get_device_name": "NVIDIA H100",
        "get_device_capability": (9, 0),
    }.items():
        monkeypatch.setattr(gpus, name, lambda _, answer=answer: answer, raising=False)
    monkeypatch.setattr(gpus, "can_device_access_peer", lambda mine, other: mine == 0, raising=False)


@pytest.mark.usefixtures("two_cards")
def test_what_is_said_of_each_gpu() -> None:
    first, second = graphics_cards()
    assert first == {
        "device": "cuda:0",
        "name": "NVIDIA H100",
        "free_bytes": 5,
        "total_bytes": 80,
        "capability": "9.0",
        "peers": ["cuda:1"],
        "error": None,
    }
    assert (second["device"], second["peers"]) == ("cuda:1", [])


def test_gpus_whose_driver_is_too_old_are_there_and_cannot_be_used(
    fake: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver lists them, and torch's CUDA is newer than it: all else is found all the same."""

    def too_old(*_: Any) -> Any:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12020).")

    pretend(monkeypatch, gpus := FakeGpus(["A"]))
    monkeypatch.setattr(gpus, "mem_get_info", too_old, raising=False)
    (card,) = graphics_cards()
    assert card.pop("error") == "The NVIDIA driver on your system is too old (found version 12020)."
    assert card.pop("device") == "cuda:0"
    assert set(card.values()) == {None}
    assert lacks(["cuda:0"], graphics_cards()) == []
    monkeypatch.setattr(LocalExecutor, "call", lambda *_: [1, 1])
    result = run("doctor", "--devices", "cpu:2")
    assert "device    cuda:0 cannot be used: The NVIDIA driver on your system is too old (found" in result.stdout


@pytest.mark.parametrize(
    ("devices", "triton", "says"),
    [
        (["cpu", "cpu"], None, "shared memory between CPU workers"),
        (["cuda:0"], "3.7", "which fast GPUs need; one device, so"),
        (["cuda:0", "cuda:1"], "3.7", "fused kernels (Triton), a step in one launch as a CUDA graph"),
        (["cuda:0", "cuda:1"], "3.7", "where plan and model allow it; exchange through nccl"),
        (["cuda:0", "cuda:0"], None, "since Triton is missing, a step in one launch"),
        (["cuda:0", "cuda:0"], None, "; exchange through memory of the host"),
        (["xpu:0", "xpu:1"], None, "exchange through xccl"),
    ],
    ids=str,
)
def test_what_patchpar_will_use(devices: list[str], triton: str | None, says: str) -> None:
    assert says in will_use(devices, {"triton": triton})


def test_what_a_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs without access to each other, in a container, without a compiler, and of several kinds."""
    cards = [{"device": f"cuda:{index}", "name": "RTX 4090", "peers": [f"cuda:{1 - index}"]} for index in range(2)]
    size = 2**30
    monkeypatch.setattr(gpu_facts.shutil, "disk_usage", lambda path: SimpleNamespace(total=size))
    monkeypatch.setattr(triton_check, "why_no_kernels", lambda index: "Failed to find C compiler" if index else "")
    monkeypatch.setattr(triton_check, "has_triton", lambda: True)
    pair = ["cuda:0", "cuda:1"]
    assert lacks(pair, cards) == ["no fused kernels on cuda:1: Failed to find C compiler"]
    assert lacks(["cuda:0"], cards) == lacks(["cpu", "cpu"], cards) == []
    cards[0]["peers"], cards[1]["name"], size = [], "RTX 3090", 2**26
    _, apart, shared, uneven = lacks(pair, cards)
    assert "cuda:0 and cuda:1 do not reach each other's memory" in apart
    assert "/dev/shm has 64.0 MiB" in shared
    assert "--ipc=host" in shared
    assert "not alike" in uneven
    assert lacks(["cuda:0"], cards) == [], "control: one GPU exchanges nothing"


def test_software_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_facts, "_answer", lambda *_: "580.1\n580.1")
    assert gpu_software()["driver"] == "580.1"
    monkeypatch.setattr(gpu_facts, "_answer", lambda *_: None)
    assert gpu_software()["driver"] is None
    assert set(gpu_software()) == {"driver", "toolkit", "nccl", "triton"}
