"""Ranks of torchrun as threads of this process, which takes no time to start. They share its environment."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from patchpar.launch import accelerators, torchrun
from patchpar.launch.torchrun import TorchrunExecutor
from tests.launch.fake_gpus import FakeGpus

PLAIN = "tests.launch.plain:PlainEngine"


def ranks_of_torchrun(monkeypatch, gpus, *, one_host=True, deadline=20.0, local_rank=0, **options):
    """Return an executor for each rank. `gpus`: the FakeGpus that each sees. `one_host`: whether torchrun says so.

    `local_rank`: of all of them, which have one environment.
    """
    own, store = threading.local(), dist.HashStore()
    monkeypatch.setenv("MASTER_PORT", f"{os.getpid()}-{id(gpus)}")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(gpus)) if one_host else "1")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that it is as before when the test has ended
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(torchrun, "_rank_and_world_size", lambda: (own.rank, len(gpus)))
    monkeypatch.setattr(
        accelerators, "device_module", lambda kind: gpus[getattr(own, "rank", 0)] if kind == "cuda" else FakeGpus([])
    )
    monkeypatch.setattr(dist, "rendezvous", lambda url, rank, world, timeout: iter([(store, rank, world)]))

    def start(rank):
        own.rank = rank
        return TorchrunExecutor(PLAIN, deadline=deadline, **options)

    return on_ranks(start, range(len(gpus)))


def on_ranks(work, ranks):
    """Return what `work` returns or raises for each of `ranks`, all at the same time."""

    def outcome(rank):
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001  the test looks at it
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(outcome, ranks))
