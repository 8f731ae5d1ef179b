"""One process with one thread against two ranks with one thread each, step by step in turn, in one run.

    python -m benchmarks.scaling                      both models, cfg=2 and patch=2 with every strategy
    python -m benchmarks.scaling --write docs/figures/scaling.md
    python -m benchmarks.scaling --model embedded --case patch=2 --repeats 15      one row: do not --write it

A step is one denoiser call with guidance on (batch 2). `large` is an SDXL-type UNet with random weights whose step
takes a second or more on one core; `embedded` is the trained model at 512 x 512. Rank 0 runs the plain step while
rank 1 sleeps, then both run the split step, which is over when the slower one has it; medians of these times and the
median ratio are printed, with the largest relative difference between the two predictions and what the bare transport
can do on the same machine.

Strategies with values of the last step are timed after their exact first step; the latent moves a little from step to
step, as it does when denoising. `displaced:preset=paper` is DistriFusion's algorithm with its own choices (halos to
everyone, keys joined by copying): the ratio to it is in the last column but two.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

from benchmarks.page import publish
from benchmarks.timed_rank import TimedRank, ratio_of, relative_error, slower
from patchpar.launch.local import LocalExecutor
from patchpar.models.files import embedded_model
from patchpar.plan.step_clock import StepClock
from patchpar.strategies import parse_strategy
from patchpar.strategies.cfg.split import GuidanceSplit

PAPER = "displaced:preset=paper"
STRATEGIES = (
    PAPER,
    "displaced",
    "pcpp",
    "fresh-edges",
    "fresh-edges:context=pooled",
    "fresh-edges:context=partials",
    "fresh-edges:bits=4",
)
CASES = ("cfg=2", "patch=2", *STRATEGIES)
MODELS = ("large", "embedded")
TARGETS = {
    ("large", "cfg=2"): 1.9,
    ("large", "patch=2"): 1.65,
    ("large", "displaced"): 1.8,
    ("large", "pcpp"): 1.9,
    ("embedded", "cfg=2"): 1.85,
    ("embedded", "patch=2"): 1.3,
    ("embedded", "displaced"): 1.5,
}
DRIFT = 0.02  # standard deviation of what is added to the latent from one step to the next
INTRO = """\
# Two ranks against one process

Seconds per denoising step with guidance, one process of one thread and two ranks of one thread in turn, medians over \
{repeats} turns; a step of two ranks is over when the slower one has it. `ratio` and `to the paper's` (DistriFusion, \
`displaced:preset=paper`) are medians of the ratios of each turn. `sent` and `waited` are those of the rank with more. \
`error`: relative difference of the two predictions, the largest of all turns, with a latent that moves a little from \
step to step. `target` is what this package aims at, on any machine. By `python -m benchmarks.scaling`.
"""


class Bench(TimedRank):
    """The engine of one rank."""

    def transport(self) -> dict[str, float]:
        """Latency in microseconds of a tiny exchange, and MiB per second each way of a large one."""

        def median_seconds(x: torch.Tensor, repeats: int) -> float:
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                self.together(x)
                times.append(time.perf_counter() - start)
            return statistics.median(times)

        return {
            "latency_us": 1e6 * median_seconds(torch.zeros(8), 500),
            "rate_mib_s": 4 / median_seconds(torch.zeros(1 << 20), 50),
        }

    def measure(self, model: str, cases: tuple[str, ...], repeats: int) -> dict[str, dict[str, object]]:
        """By case: times of plain and split steps, all in turn, their difference, and bytes sent per step."""
        denoiser, args, kwargs = large() if model == "large" else embedded()
        splits = {case: self._split(copy.deepcopy(denoiser), case) for case in cases}
        found = {case: {"single": [], "pair": [], "waited": [], "error": 0.0, "bytes": 0} for case in cases}
        with torch.no_grad():
            steps = latents(args, repeats + 2)
            before, settling = next(steps), next(steps)
            for split in splits.values():  # the first step of each is exact, the second settles its buffers
                split(*before, **kwargs)
                split(*settling, **kwargs)
            for now in steps:
                plain = partial(denoiser.forward, *now, **kwargs)
                single, want = self.timed(plain if self.context.rank == 0 else None)
                for case, split in splits.items():
                    self.comm.traffic.clear()
                    pair, got = self.timed(partial(split, *now, **kwargs))
                    figures = found[case]
                    for name, value in (("single", single), ("pair", pair), ("waited", self.waited)):
                        figures[name].append(value)
                    figures["error"] = max(figures["error"], relative_error(got, want))
                    figures["bytes"] = max(figures["bytes"], self.sent)
        return found

    def _split(self, denoiser, case: str):
        """A step of the denoiser split as the case says."""
        clock, forward = StepClock(guided=True), denoiser.forward
        if case == "cfg=2":
            layer = GuidanceSplit(self.comm, self.axis, clock)
        else:
            text = "exact" if case == "patch=2" else f"{case}:warmup_steps=1"
            layer = parse_strategy(text).install(denoiser, self.comm, self.axis, clock=clock)

        def step(*args, **kwargs):
            clock.next_call()
            output = layer.denoise(forward, *args, **kwargs)
            clock.tick()
            return output

        return step


def latents(args: tuple, steps: int) -> Iterator[tuple]:
    """The arguments of each step: the latent moves by DRIFT in a direction by chance, the same on every rank."""
    sample, *rest = args
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield (sample, *rest)
        sample = sample + DRIFT * torch.randn(sample[:1].shape, generator=generator)


def joined(of_ranks: Sequence[dict[str, dict]]) -> dict[str, dict]:
    """What both ranks found as one: times of the slower one in each turn, and the larger of other figures."""
    found = {}
    for case in of_ranks[0]:
        both = [each[case] for each in of_ranks]
        found[case] = slower(both, ("pair", "waited")) | {"bytes": max(each["bytes"] for each in both)}
    return found


def large():
    """An SDXL-type UNet of 94 M parameters on 96 x 96 latents."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=96,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(96, 192, 384),
        transformer_layers_per_block=(1, 1, 3),
        attention_head_dim=(2, 4, 6),
        cross_attention_dim=512,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=64,
        projection_class_embeddings_input_dim=6 * 64 + 256,
    )
    return unet.eval(), *_inputs(96, 512, 256)


def embedded():
    """The trained model at 512 x 512 pixels."""
    unet = UNet2DConditionModel.from_pretrained(
        embedded_model(), subfolder="unet", variant="fp16", torch_dtype=torch.float32
    )
    pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
    return unet.eval(), *_inputs(128, unet.config.cross_attention_dim, pooled)


def _inputs(latent: int, context: int, pooled: int):
    torch.manual_seed(1)
    sample = torch.randn(1, 4, latent, latent).repeat(2, 1, 1, 1)  # both branches see one latent
    added = {"text_embeds": torch.randn(2, pooled), "time_ids": torch.randn(2, 6)}
    return (sample, torch.tensor(500)), {
        "encoder_hidden_states": torch.randn(2, 28, context),
        "added_cond_kwargs": added,
        "return_dict": False,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    titles = ["model", "plan", "1 process, s", "2 ranks, s", "ratio", "target", "to the paper's", "MiB sent per step"]
    titles += ["waited, ms", "error"]
    lines = [*INTRO.format(repeats=options.repeats).splitlines(), ""]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    with LocalExecutor(["cpu", "cpu"], "benchmarks.scaling:Bench", preload=("patchpar.pipeline.runner",)) as ranks:
        link = ranks.call("transport")[0]
        for model in options.model or MODELS:
            cases = tuple(options.case or CASES)
            found = joined(ranks.call("measure", model, cases, options.repeats, expected=600.0))
            lines += [row(model, case, found[case], found.get(PAPER)) for case in cases]
    lines += [
        "",
        f"Bare transport beside it: {link['latency_us']:.0f} us per exchange, {link['rate_mib_s']:.0f} MiB/s each way.",
    ]
    publish(lines, options.write)


def row(model: str, case: str, result: dict, paper: dict | None) -> str:
    """One line of the table. Ratios are medians of those of each turn."""
    single, pair = statistics.median(result["single"]), statistics.median(result["pair"])
    ratio = ratio_of(result["single"], result["pair"])
    beside = (
        ""
        if paper is None or not case.startswith(("displaced", "pcpp", "fresh"))
        else ratio_of(paper["pair"], result["pair"])
    )
    plan = case if "=2" in case and ":" not in case else f"patch=2, {case}"
    target = TARGETS.get((model, case), "")
    cells = [model, plan, f"{single:.3f}", f"{pair:.3f}", f"{ratio:.2f}", target, beside and f"{beside:.2f}"]
    cells += [
        f"{result['bytes'] / 2**20:.2f}",
        f"{1e3 * statistics.median(result['waited']):.1f}",
        f"{result['error']:.1e}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
