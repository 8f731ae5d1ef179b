"""What each rank of `benchmarks.forecast.memory` measures in a call: bytes of live storages, and of its process."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.weights.ranks import return_freed_memory
from patchpar.launch.executor import RankContext
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import MetaMode
from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Settings of glibc's mallopt, by their numbers in malloc.h."""
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
LARGE = 65_536
"""Bytes from which an allocation is a mapping of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Bytes of the second call on one rank: the most of live storages with the weights, and of private memory.

    Private memory is what only the process of the rank has, beyond what it kept after the call before, without its
    weights and stale values.
    """

    storages: int
    private: int


class MemoryRank(PipelineRunner):
    """A rank that loads a model anew for each plan, and gives freed memory back at once.

    Else the C library keeps it in holes, of which it fills those that fit best: how many depends on all that the
    process has done before.
    """

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        for setting in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(setting, LARGE)
        super().__init__(context)

    def measure(
        self, model: tuple[str, Mapping[str, Any]], plan: str, call: Mapping[str, Any]
    ) -> MeasuredMemory | None:
        """Return what calls take on this rank; None where the plan leaves it idle. Needs all ranks."""
        parsed = Plan.parse(plan)
        self.load(*model, 0, parsed)
        self.pipe.set_progress_bar_config(disable=True)
        memory = LiveBytes("")
        with MetaMode(memory):
            self._call(parsed, call)  # also imports, and what libraries keep
            memory.begin("")
            kept = self._call(parsed, call)
        storages, weights = memory.peak, self._weights()
        del memory
        return_freed_memory()
        RESET.write_text("5")  # the most memory so far is that of now
        before = _status("RssAnon") - weights - kept
        self._call(parsed, call)
        most = _status("VmHWM") - _status("RssFile") - _status("RssShmem")
        if self.context.rank >= parsed.world_size:
            return None
        return MeasuredMemory(storages=storages + weights, private=most - before)

    def _call(self, plan: Plan, kwargs: Mapping[str, Any]) -> int:
        """Generate, and return the bytes of stale values that are kept for the next call."""
        options = CallOptions(plan=plan, verify=False, quiet=True)
        found = self.generate({**kwargs, "generator": torch.Generator().manual_seed(0)}, options)
        return found.figures[0].stale_bytes if isinstance(found, CallResult) else 0

    def _weights(self) -> int:
        networks = [each for each in self.pipe.components.values() if isinstance(each, nn.Module)]
        tensors = [x for network in networks for x in (*network.parameters(), *network.buffers())]
        return sum({id(x.untyped_storage()): x.untyped_storage().nbytes() for x in tensors}.values())


def _status(name: str) -> int:
    """Bytes that the system says of this process: resident ones that are its own, of files, shared, or the most."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
