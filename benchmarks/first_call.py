"""What the first call of a transformer costs where a plan for its tokens is shipped, and where it has to be found.

    python -m benchmarks.first_call              a minute or two, on an otherwise idle machine
    python -m benchmarks.first_call --latents 64 another size of the image

Two ranks of one thread, nothing kept from before, everything verified. The models are those of `benchmarks.tokens`.
All ways take turns; times are medians over the turns, ratios medians of the ratios.
"""

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.timed_rank import TimedRank, ratio_of, slower
from benchmarks.tokens.model import subject
from patchpar.launch.local import LocalExecutor
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch

MODELS = ("pixart", "wan")
DEADLINE = 300.0


class Bench(TimedRank):
    """The engine of one rank."""

    @torch.no_grad()
    def measure(self, name: str, latents: int, turns: int) -> dict[str, Any]:
        """Seconds of plain calls, of calls with split tokens, and of first calls."""
        whole = subject(name, toy=False).of_size(latents)
        found: dict[str, list[float]] = {way: [] for way in ("plain", "split", "shipped", "found")}
        for _ in range(turns):
            found["plain"].append(self.timed(lambda: whole.model(**whole.call))[0])
            for way in ("shipped", "found"):
                model = whole.twin()
                if way == "found":
                    model.__class__ = _of_ones_own(type(model))
                with tempfile.TemporaryDirectory() as folder:
                    layer = ExactPatch().install(
                        model, self.comm, self.axis, verifications=VerificationCache(Path(folder))
                    )
                    step = partial(layer.denoise, model.forward, **whole.call)
                    found[way].append(self.timed(step)[0])
                    found["split"].append(self.timed(step)[0])
                    layer.restore()
                self.context.beat(way)
        return {"tokens": whole.tokens, "parameters": whole.parameters, "seconds": found}


def _of_ones_own(kind: type[nn.Module]) -> type[nn.Module]:
    """A class of which nothing is shipped."""
    return type(kind.__name__, (kind,), {})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latents", type=int, default=64, help="a side of the image, two to a token")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with LocalExecutor(["cpu"] * 2, "benchmarks.first_call:Bench", deadline=DEADLINE) as ranks:
        for name in MODELS:
            found = ranks.call("measure", name, options.latents, options.turns, expected=600.0)
            seconds = slower([each["seconds"] for each in found], list(found[0]["seconds"]))
            print(f"{name}, {found[0]['parameters'] / 1e6:.1f} M parameters, {found[0]['tokens']:,} tokens:")
            for way, times in seconds.items():
                print(f"  {way:<8} {statistics.median(times):7.2f} s")
            faster = ratio_of(seconds["found"], seconds["shipped"])
            print(f"  a first call with the plan shipped is {faster:.2f} times as fast")


if __name__ == "__main__":
    main()
