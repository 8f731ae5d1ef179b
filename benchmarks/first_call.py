"""What the first call of a transformer costs where a plan for its tokens is shipped, and where it has to be found.

    python -m benchmarks.first_call              a minute or two, on an otherwise idle machine
    python -m benchmarks.first_call --latents 64 another size of the image

Two ranks of one thread, nothing kept from before, everything verified. The models are those of `benchmarks.tokens`.
All ways take turns; times are medians over the turns, ratios medians of the ratios.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.tokens.model import subject
from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import connect
from patchpar.launch.executor import RankContext
from patchpar.launch.local import LocalExecutor
from patchpar.plan.mesh import Axis, Mesh
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch

MODELS = ("pixart", "wan")
DEADLINE = 300.0


class Bench:
    """The engine of one rank."""

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        self.context = context
        self.comm = Communicator(connect(context), context.beat)
        self.axis: Axis = Mesh(context.rank, range(2), patch=2)["patch"]
        self.meet = AllGather(self.comm, self.axis, "meet", "meeting")

    @torch.no_grad()
    def measure(self, name: str, latents: int, turns: int) -> dict[str, Any]:
        """Seconds of plain calls, of calls with split tokens, and of first calls."""
        whole = subject(name, toy=False).of_size(latents)
        found: dict[str, list[float]] = {way: [] for way in ("plain", "split", "shipped", "found")}
        for _ in range(turns):
            found["plain"].append(self._timed(whole.model.forward, whole.call))
            for way in ("shipped", "found"):
                model = whole.twin()
                if way == "found":
                    model.__class__ = _of_ones_own(type(model))
                with tempfile.TemporaryDirectory() as folder:
                    layer = ExactPatch().install(
                        model, self.comm, self.axis, verifications=VerificationCache(Path(folder))
                    )
                    step = _step(layer, model.forward)
                    found[way].append(self._timed(step, whole.call))
                    found["split"].append(self._timed(step, whole.call))
                    layer.restore()
                self.context.beat(way)
        return {"tokens": whole.tokens, "parameters": whole.parameters, "seconds": found}

    def _timed(self, step: Any, call: dict[str, Any]) -> float:
        self.meet.same(torch.zeros(1))
        start = time.perf_counter()
        step(**call)
        return time.perf_counter() - start


def _of_ones_own(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of which nothing is shipped."""
    return type(kind.__name__, (kind,), {})


def _step(layer: Any, forward: Any) -> Any:
    return lambda **call: layer.denoise(forward, **call)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latents", type=int, default=64, help="a side of the image, two to a token")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with LocalExecutor(["cpu"] * 2, "benchmarks.first_call:Bench", deadline=DEADLINE) as ranks:
        for name in MODELS:
            first, second = ranks.call("measure", name, options.latents, options.turns, expected=600.0)
            slower = {way: list(map(max, each, second["seconds"][way])) for way, each in first["seconds"].items()}
            print(f"{name}, {first['parameters'] / 1e6:.1f} M parameters, {first['tokens']:,} tokens:")
            for way, times in slower.items():
                print(f"  {way:<8} {statistics.median(times):7.2f} s")
            ratios = [b / a for a, b in zip(slower["shipped"], slower["found"], strict=True)]
            print(f"  a first call with the plan shipped is {statistics.median(ratios):.2f} times as fast")


if __name__ == "__main__":
    main()
