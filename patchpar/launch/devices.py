"""Available devices, and the devices that an argument `devices=` names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from patchpar.errors import PlanError
from patchpar.launch import accelerators
from patchpar.plan.scalars import MOST_DIGITS, is_whole, plain, whole_in

GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*", "davinci[0-9]*")
"""In /dev: NVIDIA, AMD, NVIDIA under WSL, Intel (and any other that renders), Ascend."""
CPU_FILE, PCI_DEVICES = Path("/proc/cpuinfo"), Path("/sys/bus/pci/devices")
"""On Linux: a paragraph for each core, and a folder for each card."""
CARD_CLASSES = ("0x03", "0x12")
"""What class codes of PCI begin with: display controllers, processing accelerators."""
WORKERS_PER_CORE = 8
ALWAYS_ALLOWED_WORKERS = 16
RAY = "ray"
NUMBER = re.compile(rf"-?\d{{1,{MOST_DIGITS}}}")
ACCEPTED = (
    'devices may be "auto", a number, "cpu", "cpu:4" (four CPU workers), "cuda", "cuda:1", or a list of devices; '
    '"xpu", "npu" and "mps" like "cuda"; "ray:8" (eight ranks on a Ray cluster)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """One torch device name per rank, or RAY for each, and a note on how they were chosen.

    `kind`: of ranks of torchrun, the type of device that each takes; empty: what its machine has.
    """

    names: tuple[str, ...]
    note: str
    kind: str = ""

    @property
    def are_on_ray(self) -> bool:
        """Whether the ranks are actors of a Ray cluster, which gives them devices."""
        return RAY in self.names


def devices_of_plan(plan: object, world_size: int) -> Devices:
    """Return as many devices as a plan takes. Raises PlanError that names the plan if there are fewer."""
    try:
        return _from_number(world_size)
    except PlanError as error:
        reason = str(error).partition(": ")[2]
        raise PlanError(f"plan {plan} takes {world_size} devices: {reason}") from error


def resolve_devices(devices: object = "auto") -> Devices:
    """Return the devices that `devices` names.

    `devices`: "auto" (all GPUs, else the CPU); a number (GPUs where there are any, else CPU workers); "cpu"; "cpu:N"
    (N CPU workers); "cuda" (all GPUs); "cuda:i"; a list such as ["cuda:0", "cuda:2"] or ["cpu", "cpu"]. "xpu", "npu"
    and "mps" as "cuda"; "mps" has to be named. "ray:N" (N ranks on a Ray cluster, on GPUs if it has any).
    A list may name a GPU more than once: its ranks share it, and exchange through memory of the host.

    Raises PlanError for devices that do not exist or cannot work together.
    """
    devices = plain(devices)
    if isinstance(devices, (list, tuple)):
        return _from_list(devices)
    if is_whole(devices, float("-inf")):
        return _from_number(devices)
    if _is_of_torch(devices):
        return _from_list([devices])
    if isinstance(devices, str):
        return _from_text(devices.strip())
    raise PlanError(f"devices={devices!r} is a {type(devices).__name__}; {ACCEPTED}")


def count_named(devices: object) -> int | None:
    """Return how many devices an argument of `resolve_devices` names; None where that depends on the machine."""
    devices = plain(devices)
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if is_whole(devices, float("-inf")):
        return devices
    text = str(devices).strip() if isinstance(devices, str) or _is_of_torch(devices) else ""
    if "," in text:
        return len(text.split(","))
    kind, _, number = text.partition(":")
    if kind in accelerators.KINDS and number:
        return 1
    number = number if kind in ("cpu", RAY) else text
    return int(number) if NUMBER.fullmatch(number) else None


def of_torchrun(devices: object, world: int) -> Devices:
    """Return the devices of `world` ranks that torchrun has started, for an argument of `resolve_devices`.

    Each takes the device of its LOCAL_RANK, so that the argument says no more than number and type. Raises PlanError
    for another number, for devices that do not exist, and for those that such ranks do not take.
    """
    named = count_named(devices)
    if named not in (None, world):
        raise PlanError(
            f"devices={devices!r} are {named}, and torchrun has started {world} rank{'s' * (world > 1)}, as RANK, "
            f"WORLD_SIZE and LOCAL_RANK in the environment say: leave devices out, start {named} ranks, or unset "
            "these variables"
        )
    kind = _kind_of_ranks(devices)
    note = f"{world} ranks started by torchrun{f', on {kind}' if kind else ''}"
    return Devices(names=("torchrun",) * world, note=note, kind=kind)


def _kind_of_ranks(devices: object) -> str:
    """Return the type of device that an argument names for ranks of torchrun; empty if it names none."""
    devices = plain(devices)
    text = devices.strip() if isinstance(devices, str) else ""
    if is_whole(devices, float("-inf")) or text == "auto" or NUMBER.fullmatch(text):
        return ""
    found = resolve_devices(devices)
    kind = accelerators.kind_of(found.names[0])
    if found.are_on_ray or (kind != "cpu" and found.names != _gpus(kind, len(found.names)).names):
        what = "these GPUs in this order" if kind != RAY else "a Ray cluster"
        raise PlanError(
            f"devices={devices!r} under torchrun, where each rank takes the GPU of its LOCAL_RANK, and not {what}: "
            "leave devices out, or use 'cpu' or 'cuda'; CUDA_VISIBLE_DEVICES says which GPUs a process sees. Without "
            "torchrun they can be named"
        )
    return kind


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def hardware() -> tuple[str, ...]:
    """Return the model of the CPU and the PCI ids of all cards that compute, by which kinds of machines differ.

    As Linux knows them; empty elsewhere. Asks neither torch nor a driver, which would take memory of each card.
    """
    cards = sorted(f"{_word(each / 'vendor')}:{_word(each / 'device')}" for each in _cards())
    return (*_processor(), *cards)


def _processor() -> Iterator[str]:
    with suppress(OSError), CPU_FILE.open() as lines:
        fields = (line.partition(":") for line in lines)
        yield from islice((value.strip() for name, _, value in fields if name.strip() == "model name"), 1)


def _cards() -> Iterator[Path]:
    if PCI_DEVICES.is_dir():
        yield from (each for each in PCI_DEVICES.iterdir() if _word(each / "class").startswith(CARD_CLASSES))


def _word(file: Path) -> str:
    """Return what a small file holds; nothing of one that cannot be read."""
    with suppress(OSError):
        return file.read_text().strip()
    return ""


def count_of(kind: str) -> int:
    """Return the number of accelerators of a type, such as "cuda", that torch can use.

    Does not import torch (seconds) on a machine without GPUs.
    """
    return accelerators.device_count(kind) if _may_have_gpus() else 0


def main_gpus() -> tuple[str, int]:
    """Return type and number of the GPUs that "auto" and numbers mean; ("", 0) without any."""
    kind = accelerators.main_kind() if _may_have_gpus() else ""
    return kind, count_of(kind) if kind else 0


def _may_have_gpus() -> bool:
    if sys.platform == "darwin" or "torch" in sys.modules:
        return True
    return any(next(Path("/dev").glob(pattern), None) for pattern in GPU_FILES)


def _from_text(text: str) -> Devices:
    if "," in text:
        return _from_list([part.strip() for part in text.split(",")])
    if NUMBER.fullmatch(text):
        return _from_number(int(text))
    if text == "auto":
        kind, count = main_gpus()
        return _gpus(kind, count) if count else Devices(names=("cpu",), note="no GPU found: using the CPU")
    if text in accelerators.KINDS:
        if not count_of(text):
            raise PlanError(f"devices={text!r}: {_what_exists(text)}")
        return _gpus(text, count_of(text))
    kind, _, number = text.partition(":")
    if (kind == "cpu" and number) or kind == RAY:
        return _counted(kind, whole_in(number), text)
    return _from_list([text])


def _counted(kind: str, number: int | None, text: str) -> Devices:
    """Return the devices of "cpu:N" or "ray:N"; `number` is None where N is none."""
    if kind == RAY:
        return _on_ray(number or 0, text)
    if number is None:
        raise PlanError(f"devices={text!r:.80}: 'cpu:N' means N CPU workers, such as 'cpu:4'")
    return _cpu_workers(number, text)


def _from_number(number: int) -> Devices:
    if number < 1:
        raise PlanError(f"devices={number}: at least 1 device is needed")
    kind, count = main_gpus()
    if count == 0:
        found = _cpu_workers(number, number)
        return Devices(names=found.names, note=f"no GPU found: {found.note}")
    if number > count:
        raise PlanError(
            f"devices={number}: {_what_exists(kind)}; use at most {count}, or 'cpu:{number}' for CPU workers"
        )
    return _gpus(kind, number)


def _from_list(devices: Sequence[object]) -> Devices:
    if not devices:
        raise PlanError(f"devices is an empty list; {ACCEPTED}")
    if RAY in devices and set(devices) == {RAY}:  # as in `Devices.names`
        return _on_ray(len(devices), list(devices))
    names = tuple(_one_device(device) for device in devices)
    if len({name.partition(":")[0] for name in names}) > 1:
        raise PlanError(f"devices={list(names)}: CPU and GPU ranks cannot work together; use one kind")
    if names[0] == "cpu":
        return _cpu_workers(len(names), list(names))
    is_shared = len(set(names)) < len(names)
    return Devices(names=names, note=", ".join(names) + (" (shared, without NCCL)" if is_shared else ""))


def _one_device(device: object) -> str:
    """Return torch's name for one device of a list. Raises PlanError."""
    name = str(device) if _is_of_torch(device) else device
    if not isinstance(name, str):
        raise PlanError(f"{device!r} in devices is a {type(device).__name__}; write it as 'cuda:{device}' or 'cpu'")
    kind, _, index = name.partition(":")
    if name == "cpu":
        return name
    number = whole_in(index)
    if kind in accelerators.KINDS and number is not None:
        if number >= count_of(kind):
            raise PlanError(f"device {name!r} does not exist: {_what_exists(kind)}")
        return f"{kind}:{number}"
    if name in accelerators.KINDS:
        raise PlanError(f"{name!r} in devices names none of them: write '{name}:0', or devices={name!r} for all")
    raise PlanError(f"{name!r:.80} is not a device; {ACCEPTED}")


def _is_of_torch(device: object) -> bool:
    """Return whether this is a torch.device, without importing torch."""
    return type(device).__module__ == "torch"


def _gpus(kind: str, number: int) -> Devices:
    names = tuple(f"{kind}:{index}" for index in range(number))
    return Devices(names=names, note="1 GPU" if number == 1 else f"{number} GPUs")


def _cpu_workers(number: int, asked: object) -> Devices:
    cores = available_cores()
    limit = max(ALWAYS_ALLOWED_WORKERS, WORKERS_PER_CORE * cores)
    if not 1 <= number <= limit:
        raise PlanError(f"devices={asked!r}: between 1 and {limit} CPU workers can run on {_cores(cores)}")
    if number == 1:
        return Devices(names=("cpu",), note=f"the CPU ({_cores(cores)})")
    return Devices(names=("cpu",) * number, note=f"{number} CPU workers sharing {_cores(cores)}")


def _on_ray(number: int, asked: object) -> Devices:
    """Return ranks of a Ray cluster, which is not asked yet."""
    if number < 1:
        raise PlanError(f"devices={asked!r:.80}: 'ray:N' means N ranks on a Ray cluster, such as 'ray:8'")
    return Devices(names=(RAY,) * number, note=f"{number} rank{'s' * (number > 1)} on a Ray cluster")


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"


def _what_exists(kind: str) -> str:
    count = count_of(kind)
    if count == 0:
        return f"torch finds no GPU of type {kind!r} here, only the CPU"
    return f"there {'is' if count == 1 else 'are'} {', '.join(f'{kind}:{index}' for index in range(count))}"
