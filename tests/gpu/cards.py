"""The GPUs of a test, a rank on each; with `--ranks-per-gpu` several, so that one GPU is enough to run NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from patchpar.launch import worker_start

HOST_OF_EACH = Path(__file__).with_name("nccl_host")
THROUGH_SOCKETS = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def cards_of(config: pytest.Config, *, least: int = 2, most: int = 4, on_cpu: int = 2) -> list[str]:
    """A device for each of at most `most` ranks, which use NCCL; `on_cpu` workers of a CPU.

    Skips the test where there are fewer than `least`.
    """
    kind, per_gpu = config.getoption("--gpu-device"), config.getoption("--ranks-per-gpu")
    if kind == "cpu":
        return ["cpu"] * on_cpu
    count = torch.cuda.device_count() * per_gpu
    if count < least:
        pytest.skip(f"needs {least} GPUs")
    return [f"{kind}:{rank // per_gpu}" for rank in range(min(count, most))]


@contextmanager
def nccl_on_one_card(config: pytest.Config) -> Iterator[None]:
    """Let worker processes that share a GPU use NCCL, if `--ranks-per-gpu` says so."""
    if config.getoption("--ranks-per-gpu") == 1:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HOST_OF_EACH), prepend=":")
        for name, value in THROUGH_SOCKETS.items():
            patch.setenv(name, value)
        with mock.patch.object(worker_start, "needs_group", lambda devices: len(devices) > 1):
            yield
