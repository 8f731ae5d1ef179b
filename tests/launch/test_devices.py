"""What people may write for devices, and what they are told when it cannot be."""

import subprocess
import sys

import pytest
import torch

from patchpar.errors import PlanError
from patchpar.launch import accelerators, devices
from patchpar.launch.devices import of_torchrun, resolve_devices
from patchpar.launch.slurm import resolve_devices_of_task
from patchpar.pipeline.startup import _devices_of
from patchpar.plan.plan import Plan


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(accelerators, "device_count", lambda kind: 0)
    monkeypatch.setattr(devices, "available_cores", lambda: 2)


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(accelerators, "device_count", lambda kind: 3 if kind == "cuda" else 0)


@pytest.fixture(params=["xpu", "npu", "mps"])
def kind(request, monkeypatch):
    """The type of the machine's two accelerators."""
    monkeypatch.setattr(accelerators, "device_count", lambda kind: 2 if kind == request.param else 0)
    return request.param


@pytest.mark.parametrize(
    ("asked", "names", "note"),
    [
        ("auto", ["cpu"], "no GPU found: using the CPU"),
        (4, ["cpu"] * 4, "no GPU found: 4 CPU workers sharing 2 cores"),
        ("4", ["cpu"] * 4, "no GPU found: 4 CPU workers sharing 2 cores"),
        (1, ["cpu"], "no GPU found: the CPU (2 cores)"),
        ("cpu", ["cpu"], "the CPU (2 cores)"),
        ("cpu:3", ["cpu"] * 3, "3 CPU workers sharing 2 cores"),
        (["cpu", "cpu"], ["cpu"] * 2, "2 CPU workers sharing 2 cores"),
        ("cpu,cpu", ["cpu"] * 2, "2 CPU workers sharing 2 cores"),
        (torch.device("cpu"), ["cpu"], "the CPU (2 cores)"),
    ],
    ids=str,
)
def test_without_a_gpu(no_gpu, asked, names, note):
    found = resolve_devices(asked)
    assert list(found.names) == names
    assert found.note == note


@pytest.mark.parametrize(
    ("asked", "names", "note"),
    [
        ("auto", ["cuda:0", "cuda:1", "cuda:2"], "3 GPUs"),
        ("cuda", ["cuda:0", "cuda:1", "cuda:2"], "3 GPUs"),
        (2, ["cuda:0", "cuda:1"], "2 GPUs"),
        (1, ["cuda:0"], "1 GPU"),
        ("cuda:1", ["cuda:1"], "cuda:1"),
        (("cuda:2", torch.device("cuda:0")), ["cuda:2", "cuda:0"], "cuda:2, cuda:0"),
        ("cpu:2", ["cpu", "cpu"], None),
    ],
    ids=str,
)
def test_with_gpus(three_gpus, asked, names, note):
    found = resolve_devices(asked)
    assert list(found.names) == names
    assert note is None or found.note == note


def test_other_accelerators(kind):
    assert resolve_devices(kind).names == (f"{kind}:0", f"{kind}:1")
    assert resolve_devices([f"{kind}:1", f"{kind}:0"]).names == (f"{kind}:1", f"{kind}:0")
    assert resolve_devices(torch.device(kind, 1) if kind != "npu" else "npu:1").names == (f"{kind}:1",)
    for unwanted, says in [(f"{kind}:2", "does not exist: there are"), ([f"{kind}:0", "cpu"], "cannot work together")]:
        with pytest.raises(PlanError, match=says):
            resolve_devices(unwanted)
    with pytest.raises(PlanError, match="no GPU of type 'cuda' here"):
        resolve_devices("cuda")


def test_other_accelerators_are_the_gpus_of_a_number(kind):
    """But Apple's, which has to be named: it shares the CPU's memory."""
    found = ("cpu",) * 2 if kind == "mps" else (f"{kind}:0", f"{kind}:1")
    assert resolve_devices(2).names == found
    assert resolve_devices("auto").names == (("cpu",) if kind == "mps" else found)


@pytest.mark.parametrize("asked", [["cuda:0", "cuda:0"], "cuda:0, cuda:0"])
def test_a_gpu_is_shared_only_on_request(three_gpus, asked):
    """To try plans for several GPUs on one."""
    found = resolve_devices(asked)
    assert found.names == ("cuda:0", "cuda:0")
    assert "shared" in found.note
    assert "shared" not in resolve_devices("cuda").note


def test_a_plan_for_more_devices_than_there_are_is_named(no_gpu):
    says = r"^plan patch=64\S* takes 64 devices: between 1 and 16 CPU workers can run on 2 cores"
    with pytest.raises(PlanError, match=says):
        resolve_devices_of_task("auto", Plan(patch=64))
    assert resolve_devices_of_task("auto", Plan(patch=2)).names == ("cpu", "cpu")
    assert resolve_devices_of_task("cpu:3", Plan(patch=2)).names == ("cpu", "cpu", "cpu")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (0, "at least 1"),
        (-2, "at least 1"),
        ("cpu:0", "between 1 and 16"),
        ("cpu:x", "'cpu:4'"),
        ("cpu:²", "'cpu:4'"),
        ("--2", "'--2' is not a device"),
        (1000, r"between 1 and 16 CPU workers can run on 2 cores"),
        ("cuda", "no GPU of type 'cuda' here, only the CPU"),
        ("xpu", "no GPU of type 'xpu' here, only the CPU"),
        ("cuda:0", "'cuda:0' does not exist: torch finds no GPU of type 'cuda' here"),
        ("mps:0", "'mps:0' does not exist: torch finds no GPU of type 'mps' here"),
        (["cpu", "cuda:1"], "'cuda:1' does not exist"),
        ([], "empty list"),
        ([0, 1], "write it as 'cuda:0'"),
        (["cpu:2"], "not a device"),
        ("gpu", "'gpu' is not a device; devices may be"),
        ("", "not a device"),
        ("²", "'²' is not a device"),
        ("cuda:²", "'cuda:²' is not a device"),
        (2.0, "a float"),
        (True, "a bool"),
        (None, "a NoneType"),
    ],
    ids=str,
)
def test_what_cannot_be_without_a_gpu(no_gpu, asked, says):
    with pytest.raises(PlanError, match=says):
        resolve_devices(asked)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (4, r"there are cuda:0, cuda:1, cuda:2; use at most 3, or 'cpu:4'"),
        ("cuda:3", "'cuda:3' does not exist: there are cuda:0, cuda:1, cuda:2"),
        (["cuda:0", "cpu"], "cannot work together"),
        (["cuda"], "'cuda' in devices names none of them: write 'cuda:0', or devices='cuda' for all"),
    ],
    ids=str,
)
def test_what_cannot_be_with_gpus(three_gpus, asked, says):
    with pytest.raises(PlanError, match=says):
        resolve_devices(asked)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ("auto", ""),
        (2, ""),
        ("2", ""),
        ("cpu", "cpu"),
        ("cpu:2", "cpu"),
        (["cpu", "cpu"], "cpu"),
        (torch.device("cpu"), "cpu"),
        ("cuda", "cuda"),
        (["cuda:0", "cuda:1"], "cuda"),
        ("cuda:0,cuda:1", "cuda"),
    ],
    ids=str,
)
def test_ranks_of_torchrun_take_devices_of_the_type_that_is_asked_for(three_gpus, asked, kind):
    found = of_torchrun(asked, 2)
    assert (found.names, found.kind) == (("torchrun",) * 2, kind)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (3, "are 3, and torchrun has started 2 ranks"),
        ("cpu:4", "are 4, and torchrun has started 2 ranks"),
        ("cuda:1", "are 1, and torchrun has started 2 ranks"),
        (torch.device("cuda", 0), "are 1, and torchrun has started 2 ranks"),
        (["cuda:1", "cuda:0"], "the GPU of its LOCAL_RANK, and not these GPUs in this order: .*CUDA_VISIBLE_DEVICES"),
        ("cuda:0,cuda:2", "the GPU of its LOCAL_RANK, and not these"),
        ("ray:2", "not a Ray cluster: leave devices out"),
        ("xpu", "no GPU of type 'xpu'|there are"),
        ("gpu", "'gpu' is not a device"),
        (None, "a NoneType"),
    ],
    ids=str,
)
def test_devices_that_ranks_of_torchrun_would_not_take_are_refused(three_gpus, asked, says):
    with pytest.raises(PlanError, match=says):
        of_torchrun(asked, 2)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU, so torch is needed to count")
def test_choosing_devices_does_not_import_torch_where_there_is_no_gpu():
    code = "import sys; from patchpar.launch.devices import resolve_devices; resolve_devices(2); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "patchpar.launch.devices" in modules
    assert "torch" not in modules


def test_hardware_is_the_processor_and_all_cards_that_compute(monkeypatch, tmp_path):
    """Two equal GPUs and an accelerator, beside a network card; without such files nothing is known."""
    cards = [("0x030200", "0x2330"), ("0x030200", "0x2330"), ("0x120000", "0x74a1"), ("0x020000", "0x1017")]
    for number, (kind, device) in enumerate(cards):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        for name, value in (("class", kind), ("vendor", "0x10de"), ("device", device)):
            (folder / name).write_text(f"{value}\n")
    processor = tmp_path / "cpuinfo"
    processor.write_text("processor\t: 0\nmodel name\t: EPYC\n\nprocessor\t: 1\nmodel name\t: EPYC\n")
    monkeypatch.setattr(devices, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(devices, "CPU_FILE", processor)
    assert devices.hardware.__wrapped__() == ("EPYC", "0x10de:0x2330", "0x10de:0x2330", "0x10de:0x74a1")
    monkeypatch.setattr(devices, "PCI_DEVICES", tmp_path / "none")
    monkeypatch.setattr(devices, "CPU_FILE", tmp_path / "none")
    assert devices.hardware.__wrapped__() == ()


@pytest.mark.parametrize(("devices", "plan"), [("auto", None), ("cpu:2", None), (2, None), ("auto", Plan(patch=2))])
def test_several_tasks_of_slurm_do_not_each_start_all_workers(no_gpu, monkeypatch, devices, plan):
    """One task starts them, and so does one that works alone on a device that is named."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    for tasks in ("", "1", "4"):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
        assert _devices_of("cpu", None).names == ("cpu",)
        assert _devices_of("auto", Plan()).names == ("cpu",)
        if tasks != "4":
            assert _devices_of(devices, plan).names
            continue
        with pytest.raises(PlanError, match=r"task 1 of 4 that srun has started, .* start one task \(srun"):
            _devices_of(devices, plan)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert len(_devices_of("auto", plan).names) == 2  # ranks of torchrun, one of which runs in each task
