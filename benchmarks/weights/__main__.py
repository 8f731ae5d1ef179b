"""The memory and the time that a model takes on each rank, with whole, sharded and hosted weights.

    python -m benchmarks.weights --write docs/figures/weights.md
    python -m benchmarks.weights --heads 4 --double 1 --single 20 --ranks 2 --runs 1
    python -m benchmarks.weights --ranks 4 --kind sharded --runs 0       # memory only, 5 GB of it
    python -m benchmarks.weights --ranks 4 --kind sharded --kind hosted --runs 0 --load float32:bfloat16

A FLUX-type transformer with random weights is saved in bfloat16, or in float32, and loaded by CPU workers in the dtype
of the files or in another one, which has to be cast. Memory: what only the process of a rank has (Private_Dirty in
/proc/self/smaps_rollup, sampled every 20 ms), beyond what it had before, and its own shards, which all ranks of a CPU
host map; the most of all ranks, of new processes. W: bytes of all weights; slots: the buffers in which blocks run.
Times: medians, of the slowest rank; the kinds of weights take turns. In the dtype of the files whole and sharded
weights on a CPU are pages of the files, which are not read while they are loaded: a GPU, or host memory for one, would
get them then, so that there is also the time of whole weights with each copied once, to memory that is kept.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.page import priority, publish, write_page

KINDS = ("whole", "sharded", "hosted")
LOADS = (("bfloat16", "bfloat16"), ("bfloat16", "float16"), ("float32", "bfloat16"))
"""The dtype of the files, and that of the loaded weights, of two bytes each: W is the same."""
COPIED = "whole, copied"
MARGIN = 0.1  # of W, for everything else
Figures = dict[str, float]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=20, help="of 64 features each")
    parser.add_argument("--double", type=int, default=8, help="blocks with text and image apart")
    parser.add_argument("--single", type=int, default=20, help="blocks with both together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", type=int, default=5, help="loads of each kind; 0: no times")
    parser.add_argument("--kind", choices=KINDS, action="append", help="of weights whose memory is measured")
    names = [":".join(each) for each in LOADS]
    parser.add_argument("--load", choices=names, action="append", help="dtypes of the files and of the weights")
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        publish(page(Path(folder) / "model", options), options.write)


def page(folder: Path, options: argparse.Namespace) -> list[str]:
    """The tables of a model that is saved in `folder`."""
    import torch

    from benchmarks.weights.model import save_model

    loads = [tuple(each.split(":")) for each in options.load] if options.load else LOADS
    for saved in dict.fromkeys(saved for saved, _ in loads):
        dtype, sizes = getattr(torch, saved), {name: getattr(options, name) for name in ("heads", "double", "single")}
        save_model(folder / saved, **sizes, dtype=dtype)
        files = sum(file.stat().st_size for file in (folder / saved).rglob("*.safetensors"))
        weights = round(files * torch.bfloat16.itemsize / dtype.itemsize)
    lines = [
        "# Weights: memory and loading",
        "",
        f"A FLUX-type model of random weights ({options.double} double and {options.single} single blocks of width "
        f"{64 * options.heads}), W = {_mb(weights)} in two bytes each, on CPU workers with one thread each. "
        "Memory is what only the process of a rank has, beyond what it had before, with its own shards, which the "
        "others read where they lie, and without pages of files, which the system has once for all ranks and can drop: "
        "the most of all ranks. Limit: the "
        f"part of W that a rank keeps, the slots, and {MARGIN:.0%} of W. Of hosted weights that part is in host "
        "memory, which the system counts as a process's own until another one has read it, in the first image "
        "(unshared: before it, and after the last); then all ranks have it in common, and the limit is less. "
        "Whole weights are left out where all ranks together lack the memory to cast them. "
        f"{_how_timed(options.runs)}Load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
        f"cores.{priority()} `python -m benchmarks.weights`",
    ]
    for ranks in options.ranks:
        for saved, loaded in loads:
            of_torch, model = getattr(torch, loaded), str(folder / saved)
            cast = weights * (1 + getattr(torch, saved).itemsize // 2) if saved != loaded else 0
            kinds = options.kind or [kind for kind in KINDS if kind != "whole" or _is_free(ranks * cast)]
            memory = {kind: memory_of(model, ranks, of_torch, kind) for kind in kinds}
            seconds = load_seconds(model, ranks, of_torch, options.runs) if options.runs and "whole" in kinds else {}
            how = "as in the files" if saved == loaded else f"cast from {saved} in the files"
            lines += ["", f"## {ranks} ranks, {loaded} ({how})", "", *table(memory, seconds, weights, ranks)]
            print("\n".join(lines[-3 - len(memory) :]), flush=True)
            if options.write:  # what is measured so far
                write_page("\n".join(lines) + "\n", options.write)
    return lines


def _is_free(num_bytes: int) -> bool:
    """Whether so much memory is free, and a quarter more."""
    from patchpar.launch.host_memory import free_memory

    return 1.25 * num_bytes < (free_memory() or 0)


def _how_timed(runs: int) -> str:
    if not runs:
        return ""
    return (
        f"Load times are medians of {runs} in turns; of whole weights also with each copied once, since a CPU only "
        "maps those in the dtype of their files, whole or sharded. "
    )


def memory_of(folder: str, ranks: int, dtype: Any, kind: str) -> Figures:
    """Bytes while loading and generating: the most of all ranks."""
    from patchpar.launch.local import LocalExecutor
    from patchpar.plan.plan import Plan

    with LocalExecutor(["cpu"] * ranks, "benchmarks.weights.ranks:MeasuredRank", deadline=600.0) as pool:
        each = pool.call("measure", folder, Plan(patch=ranks, weights=kind), dtype)
    return {name: max(rank[name] for rank in each) for name in each[0]}


def load_seconds(folder: str, ranks: int, dtype: Any, runs: int) -> dict[str, float]:
    """Median seconds of loading by kind, and of loading and copying whole weights."""
    from patchpar.launch.local import LocalExecutor
    from patchpar.plan.plan import Plan

    found: dict[str, list[float]] = {kind: [] for kind in (*KINDS, COPIED)}
    with LocalExecutor(["cpu"] * ranks, "benchmarks.weights.ranks:MeasuredRank", deadline=600.0) as pool:
        for run in range(-1, runs):  # the first imports modules
            for kind, seconds in found.items():
                plan = Plan(patch=ranks, weights="whole" if kind == COPIED else kind)
                taken = max(pool.call("load_seconds", folder, plan, dtype, kind == COPIED))
                if run >= 0:
                    seconds.append(taken)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def table(memory: dict[str, Figures], seconds: dict[str, float], weights: int, ranks: int) -> Iterator[str]:
    """Lines of a table, with what each kind may take."""
    times = "load | of whole | of whole, copied |" if seconds else ""
    heads = "weights | while loading | its limit | first image | limit of it | next image | limit | slots | unshared |"
    yield f"| {heads} {times}".rstrip()
    yield "|" + "---|" * (12 if seconds else 9)
    for kind, found in memory.items():
        of_rank = {"whole": weights, "sharded": weights / ranks, "hosted": weights / ranks}[kind]
        margin, kept = MARGIN * weights, 0 if kind == "hosted" else of_rank
        cells = [found["loading"], of_rank + margin, found["first"], of_rank + found["slots"] + margin]
        cells += [found["generating"], kept + found["slots"] + margin, found["slots"]]
        unshared = f"{_mb(found['unshared'])}, {_mb(found['unshared after'])}" if kind == "hosted" else ""
        yield f"| {' | '.join([kind, *map(_mb, cells), unshared, *_times(kind, seconds)])} |"


def _times(kind: str, seconds: dict[str, float]) -> Iterator[str]:
    if seconds:
        copied = f" ({seconds[COPIED]:.2f} s)" if kind == "whole" else ""
        yield f"{seconds[kind]:.2f} s{copied}"
        yield from (f"{seconds[kind] / seconds[of]:.2f}" for of in ("whole", COPIED))


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


if __name__ == "__main__":
    main()
