"""Seconds of each block call, measured in passes in which every rank runs all blocks, and agreed by the ranks."""

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.errors import UnsupportedModel
from patchpar.launch.accelerators import device_module
from patchpar.shard.stages.block_hooks import OnCall, Run
from patchpar.shard.verification import uncounted

PASSES = 2  # the pass before them, in which calls are recorded, has loaded the kernels


class BlockTimer:
    """Called for each block call of a pass; `seconds` are those of each, until the device has ended it."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device = device

    def __call__(self, number: int, path: str, run: Run) -> Any:
        """Run a block."""
        self._settle()
        start = time.perf_counter()
        output = run()
        self._settle()
        self.seconds.append(time.perf_counter() - start)
        return output

    def _settle(self) -> None:
        if self._device.type != "cpu":
            device_module(self._device.type).synchronize()


def seconds_of_blocks(plain: Callable[[OnCall], Any], mesh: AxisComm) -> list[float]:
    """Return the seconds of each block call: the least of two passes on any rank of the axis, the same on all of them.

    `plain` runs the network once, through block calls that go to its argument. Other programs of the machine make a
    pass longer and never shorter. Empty on the meta device. Collective. Raises UnsupportedModel where ranks run
    different numbers of blocks, and ExchangeError.
    """
    comm, axis = mesh
    device = comm.transport.device
    if device.type == "meta":
        return []
    passes = []
    for _ in range(PASSES):
        timer = BlockTimer(device)
        plain(timer)
        passes.append(timer.seconds)
    with uncounted(comm):
        found = AllGather(comm, axis, "verify", "seconds of blocks").of_bytes(json.dumps(passes).encode())
    of_ranks = [seconds for each in found for seconds in json.loads(each)]
    if len({len(each) for each in of_ranks}) > 1:
        raise UnsupportedModel(
            f"the ranks run different numbers of blocks ({', '.join(map(str, map(len, of_ranks)))}): give all of them "
            "the same model and the same call, or use stage=1"
        )
    return [min(each) for each in zip(*of_ranks, strict=True)]
