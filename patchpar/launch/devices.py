"""Available devices, and the devices that an argument `devices=` names."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchpar.errors import PlanError
from patchpar.plan.scalars import is_whole, plain

GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # in /dev: NVIDIA, AMD, and NVIDIA under WSL
WORKERS_PER_CORE = 8
ALWAYS_ALLOWED_WORKERS = 16
ACCEPTED = 'devices may be "auto", a number, "cpu", "cpu:4" (four CPU workers), "cuda", "cuda:1", or a list of devices'


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """One torch device name per rank, and a note on how they were chosen."""

    names: tuple[str, ...]
    note: str


def resolve_devices(devices: object = "auto", *, oversubscribe: bool = False) -> Devices:
    """Return the devices that `devices` names.

    `devices`: "auto" (all GPUs, else the CPU); a number (GPUs where there are any, else CPU workers); "cpu"; "cpu:N"
    (N CPU workers); "cuda" (all GPUs); "cuda:i"; a list such as ["cuda:0", "cuda:2"] or ["cpu", "cpu"].
    `oversubscribe`: allow a list to name a GPU more than once; its ranks then communicate through shared memory.

    Raises PlanError for devices that do not exist, repeat, or cannot work together.
    """
    devices = plain(devices)
    if isinstance(devices, (list, tuple)):
        return _from_list(devices, oversubscribe)
    if is_whole(devices, float("-inf")):
        return _from_number(devices)
    if type(devices).__module__ == "torch":
        return _from_list([devices], oversubscribe)
    if isinstance(devices, str):
        return _from_text(devices.strip(), oversubscribe)
    raise PlanError(f"devices={devices!r} is a {type(devices).__name__}; {ACCEPTED}")


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_count() -> int:
    """Return the number of GPUs that torch can use. Does not import torch (seconds) on a machine without GPUs."""
    has_files = any(next(Path("/dev").glob(pattern), None) for pattern in GPU_FILES)
    if not has_files and "torch" not in sys.modules:
        return 0
    import torch

    return torch.cuda.device_count()


def _from_text(text: str, oversubscribe: bool) -> Devices:
    if "," in text:
        return _from_list([part.strip() for part in text.split(",")], oversubscribe)
    if text.lstrip("-").isdigit():
        return _from_number(int(text))
    if text == "auto":
        return _gpus(gpu_count()) if gpu_count() else Devices(names=("cpu",), note="no GPU found: using the CPU")
    if text == "cuda":
        if not gpu_count():
            raise PlanError(f"devices='cuda': {_what_exists()}")
        return _gpus(gpu_count())
    kind, _, number = text.partition(":")
    if kind == "cpu" and number:
        if not number.isdigit():
            raise PlanError(f"devices={text!r}: 'cpu:N' means N CPU workers, such as 'cpu:4'")
        return _cpu_workers(int(number), text)
    return _from_list([text], oversubscribe)


def _from_number(number: int) -> Devices:
    if number < 1:
        raise PlanError(f"devices={number}: at least 1 device is needed")
    count = gpu_count()
    if count == 0:
        found = _cpu_workers(number, number)
        return Devices(names=found.names, note=f"no GPU found: {found.note}")
    if number > count:
        raise PlanError(f"devices={number}: {_what_exists()}; use at most {count}, or 'cpu:{number}' for CPU workers")
    return _gpus(number)


def _from_list(devices: Sequence[object], oversubscribe: bool) -> Devices:
    if not devices:
        raise PlanError(f"devices is an empty list; {ACCEPTED}")
    names = tuple(_one_device(device) for device in devices)
    if len({name.partition(":")[0] for name in names}) > 1:
        raise PlanError(f"devices={list(names)}: CPU and GPU ranks cannot work together; use one kind")
    if names[0] == "cpu":
        return _cpu_workers(len(names), list(names))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated and not oversubscribe:
        raise PlanError(f"devices={list(names)}: {', '.join(repeated)} repeats; name each GPU once")
    return Devices(names=names, note=", ".join(names) + (" (shared, without NCCL)" if repeated else ""))


def _one_device(device: object) -> str:
    """Return torch's name for one device of a list. Raises PlanError."""
    name = str(device) if type(device).__module__ == "torch" else device
    if not isinstance(name, str):
        raise PlanError(f"{device!r} in devices is a {type(device).__name__}; write it as 'cuda:{device}' or 'cpu'")
    kind, _, index = name.partition(":")
    if name == "cpu":
        return name
    if kind == "cuda" and index.isdigit():
        if int(index) >= gpu_count():
            raise PlanError(f"device {name!r} does not exist: {_what_exists()}")
        return f"cuda:{int(index)}"
    raise PlanError(f"{name!r} is not a device; {ACCEPTED}")


def _gpus(number: int) -> Devices:
    names = tuple(f"cuda:{index}" for index in range(number))
    return Devices(names=names, note="1 GPU" if number == 1 else f"{number} GPUs")


def _cpu_workers(number: int, asked: object) -> Devices:
    cores = available_cores()
    limit = max(ALWAYS_ALLOWED_WORKERS, WORKERS_PER_CORE * cores)
    if not 1 <= number <= limit:
        raise PlanError(f"devices={asked!r}: between 1 and {limit} CPU workers can run on {_cores(cores)}")
    if number == 1:
        return Devices(names=("cpu",), note=f"the CPU ({_cores(cores)})")
    return Devices(names=("cpu",) * number, note=f"{number} CPU workers sharing {_cores(cores)}")


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"


def _what_exists() -> str:
    count = gpu_count()
    if count == 0:
        return "torch finds no GPU here, only the CPU"
    return f"there {'is' if count == 1 else 'are'} {', '.join(f'cuda:{index}' for index in range(count))}"
