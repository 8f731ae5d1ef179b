"""What one rank measures: the memory that only its process has, while it loads a model and generates with it."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from benchmarks.weights.model import CALL
from patchpar.launch.executor import RankContext
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan

SECONDS = 0.02  # between two samples
SEGMENT = "patchpar-weights"  # what the system calls memory for weights that other ranks map
OWN = "rw-s"  # how a rank maps what it has written for others; those of other ranks it maps with writes of its own
PRIVATE = "Private_Dirty:"  # what is clean is in a file, and the system can drop it


def memory_of_process(*, with_shards: bool = False) -> int:
    """Bytes that only this process has, without untouched memory and pages of files.

    `with_shards`: and its own shards, also those that other ranks of the host have read.
    """
    private = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size, *_ = line.split()
        private += int(size) * 1024 if name == PRIVATE else 0
    return private + (_in_own_segments("Rss:") - _in_own_segments(PRIVATE) if with_shards else 0)


def unshared_host_memory() -> int:
    """Bytes of hosted weights that only this process has read or written so far: others have them from then on."""
    return _in_own_segments(PRIVATE)


def _in_own_segments(kind: str) -> int:
    """Bytes of memory for weights that this rank writes to and others map, of this kind."""
    total, is_segment = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, size, *_ = line.split()
        if not name.endswith(":"):  # the first line of a mapping, with its addresses and the name of its file
            is_segment = SEGMENT in line and size == OWN
        elif is_segment and name == kind:
            total += int(size) * 1024
    return total


def return_freed_memory() -> None:
    """Let Python free models of before, and the C library return what it keeps of freed memory, tens of MB."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


class PeakMemory:
    """The most memory within a `with` statement, sampled by a thread; see `memory_of_process`."""

    def __init__(self, *, with_shards: bool) -> None:
        self._with_shards = with_shards

    def __enter__(self) -> PeakMemory:
        self.bytes, self._ends = self._now(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ends.wait(SECONDS):
            with suppress(OSError):
                self.bytes = max(self.bytes, self._now())

    def _now(self) -> int:
        return memory_of_process(with_shards=self._with_shards)

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.bytes = max(self.bytes, self._now())


class MeasuredRank(PipelineRunner):
    """A rank that loads a model anew for each measurement."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        torch.set_num_threads(1)

    def measure(self, folder: str, plan: Plan, dtype: torch.dtype) -> dict[str, float]:
        """Load a model and generate twice: bytes beyond those before it was loaded."""
        before, peak = memory_of_process(), partial(PeakMemory, with_shards=plan.weights == "sharded")
        with peak() as loading:
            self.load(folder, {"torch_dtype": dtype}, 0, plan)
        self.pipe.set_progress_bar_config(disable=True)
        return_freed_memory()
        unshared = unshared_host_memory()
        with peak() as first:
            self._generate(plan)
        return_freed_memory()
        with peak() as generating:
            self._generate(plan)
        weights = self._installed.weights
        in_slots = [] if weights is None else [x for x in weights._sharded.values() if x is not None]
        return {
            "loading": loading.bytes - before,
            "first": first.bytes - before,
            "generating": generating.bytes - before,
            "unshared": unshared,
            "unshared after": unshared_host_memory(),
            "slots": sum(sum(x.numel() for x in each._slots) for each in in_slots),
        }

    def load_seconds(self, folder: str, plan: Plan, dtype: torch.dtype, copied: bool) -> float:
        """Seconds of loading a model, which is dropped afterwards; with `copied`, and of copying all its weights.

        Into memory that this process does not have yet, as when it has just started.
        """
        return_freed_memory()
        start, rank = time.perf_counter(), PipelineRunner(self.context)
        self._connection_of_loading = rank._connection  # lives on: other ranks may wait for its messages
        rank.load(folder, {"torch_dtype": dtype}, 0, plan)
        if copied:
            networks = [each for each in rank.pipe.components.values() if isinstance(each, torch.nn.Module)]
            for x in (x for network in networks for x in network.parameters()):
                x.data = x.detach().clone()
        return time.perf_counter() - start

    def _generate(self, plan: Plan) -> None:
        kwargs = {**CALL, "generator": torch.Generator().manual_seed(0)}
        self.generate(kwargs, CallOptions(plan=plan, verify=False, quiet=True))
