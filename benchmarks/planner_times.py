"""How long the planner takes: the first plan of a model, a kept one, many devices, and measuring this machine.

    python -m benchmarks.planner_times --runs 3
    python -m benchmarks.planner_times --write docs/figures/planner-times.md

Commands as a user runs them, each a new process: from its start to its end. The first time a plan is looked for nothing
is kept from before, later times have what the first one has kept. FLUX.1 dev is a folder of configurations at its own
size, without weights. Medians; also the processor time, which a busy machine does not change much.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.page import publish

FLUX = "FLUX.1 dev"
HOST, MANY, THOUSAND = "8xH100-nvlink", "38x(8xH100-nvlink)-ib400", "125x(8xH100-nvlink)-ib400"
"""8, 304 and 1,000 devices."""
SIZE = ["--height", "1024", "--width", "1024", "--dtype", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command of patchpar, with the seconds that it may take. `again`: with what it has kept before."""

    what: str
    words: tuple[str, ...]
    limit: float
    again: bool = False


class Seconds(NamedTuple):
    """Of one process and all that it has started, from its start to its end."""

    wall: float
    processor: float


CASES = (
    Case(what="plan, embedded model, 8 devices, first", words=("plan", "embedded", "--machine", HOST), limit=5.0),
    Case(
        what="plan, embedded model, 8 devices, kept",
        words=("plan", "embedded", "--machine", HOST),
        limit=0.5,
        again=True,
    ),
    Case(what=f"plan, {FLUX}, 8 devices, first", words=("plan", FLUX, "--machine", HOST, *SIZE), limit=5.0),
    Case(what=f"plan, {FLUX}, 8 devices, kept", words=("plan", FLUX, "--machine", HOST, *SIZE), limit=0.5, again=True),
    Case(what="plan, embedded model, 304 devices, first", words=("plan", "embedded", "--machine", MANY), limit=10.0),
    Case(
        what=f"simulate, {FLUX}, 1,000 devices, kept",
        words=("simulate", FLUX, "--machine", THOUSAND, "--plan", "data=125,patch=8", *SIZE),
        limit=1.0,
        again=True,
    ),
    Case(what="tune, two workers on the CPU", words=("tune", "--devices", "cpu:2"), limit=20.0),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each command")
    parser.add_argument("--only", default="", help="commands with this in their description, such as embedded")
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    with TemporaryDirectory() as folder:
        save_flux(Path(folder) / "flux")
        measured = {each: seconds_of(each, Path(folder), options.runs) for each in CASES if options.only in each.what}
    publish(lines(measured, options.runs, load), options.write)


def lines(measured: dict[Case, Seconds], runs: int, load: str) -> Iterator[str]:
    """Yield the page. `load`: of the machine when it was measured."""
    times = "one run each" if runs == 1 else f"medians of {runs} runs"
    yield "# Time of the planner"
    yield ""
    yield (
        f"From the start of a command to its end, with Python and its imports: {times}. `first`: "
        "nothing is kept from before. `kept`: the command was run once before with the same arguments. `processor`: "
        "seconds of all cores, which do not wait for what else the machine does. Limits are those of a "
        f"machine that does nothing else; load of this one at the start: {load}. `python -m benchmarks.planner_times`"
    )
    yield ""
    yield "| command | s | processor, s | limit, s | processor within it |"
    yield "|---|---|---|---|---|"
    for case, found in measured.items():
        held = "yes" if found.processor <= case.limit else "no"
        yield f"| {case.what} | {found.wall:.2f} | {found.processor:.2f} | {case.limit:g} | {held} |"


def seconds_of(case: Case, folder: Path, runs: int) -> Seconds:
    """Return the medians of so many runs. `folder`: has the model, and gets a home for each run."""
    found = []
    for run in range(runs):
        home = folder / f"home {run} {'_'.join(case.words).replace('/', '_')}"
        if case.again and not home.exists():
            _timed(case.words, folder, home)
        found.append(_timed(case.words, folder, home))
    return Seconds(*map(statistics.median, zip(*found, strict=True)))


def _timed(words: Sequence[str], folder: Path, home: Path) -> Seconds:
    home.mkdir(exist_ok=True)
    named = [str(folder / "flux") if word == FLUX else word for word in words]
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[1])}
    start, before = time.perf_counter(), _processor()
    subprocess.run(
        [sys.executable, "-m", "patchpar", *named], env=environment, check=True, capture_output=True, timeout=600
    )
    return Seconds(time.perf_counter() - start, _processor() - before)


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def save_flux(folder: Path) -> None:
    """Write a folder with the configurations of FLUX.1 dev, and no weights."""
    import torch
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, T5Config

    from benchmarks.forecast.encoders import CLIP_L, CLIP_TOKENS, T5_XXL
    from benchmarks.forecast.models import VAE
    from tests.tiny import build

    build("flux").pipe.save_pretrained(folder)  # with its tokenizers and scheduler
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    with torch.device("meta"):
        FluxTransformer2DModel(guidance_embeds=True).save_config(folder / "transformer")
        latents = {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
        AutoencoderKL(**VAE, **latents, use_quant_conv=False, use_post_quant_conv=False).save_config(folder / "vae")
    clip = CLIPTextConfig(**CLIP_L, max_position_embeddings=CLIP_TOKENS, architectures=["CLIPTextModel"])
    clip.save_pretrained(folder / "text_encoder")
    t5 = T5Config(**T5_XXL, feed_forward_proj="gated-gelu", architectures=["T5EncoderModel"])
    t5.save_pretrained(folder / "text_encoder_2")


if __name__ == "__main__":
    main()
