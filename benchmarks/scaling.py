"""One process with one thread against two ranks with one thread each, step by step in turn, in one run.

    python -m benchmarks.scaling                      both models, cfg=2 and patch=2
    python -m benchmarks.scaling --model embedded --repeats 15 --write docs/figures/scaling.md

A step is one denoiser call with guidance on (batch 2). `large` is an SDXL-type UNet with random weights whose step
takes a second or more on one core; `embedded` is the trained model at 512 x 512. Rank 0 runs the plain step while
rank 1 sleeps, then both run the split step; medians of the pairs' times and the median ratio are printed, with the
relative difference between the two predictions and what the bare transport can do on the same machine.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

from patchpar.launch.context import RankContext
from patchpar.launch.local import LocalExecutor
from patchpar.models.folder import embedded_model

PLANS = ("cfg=2", "patch=2")
MODELS = ("large", "embedded")
TARGETS = {
    ("large", "cfg=2"): 1.9,
    ("large", "patch=2"): 1.65,
    ("embedded", "cfg=2"): 1.85,
    ("embedded", "patch=2"): 1.3,
}


class Bench:
    """The engine of one rank."""

    def __init__(self, context: RankContext) -> None:
        import torch

        from patchpar.exchange import Door, Gather
        from patchpar.mesh import Mesh
        from patchpar.transport import connect

        torch.set_num_threads(1)
        self.context = context
        self.door = Door(connect(context.device, deadline=context.deadline), context.mark)
        self.axis = Mesh(context.rank, range(2), patch=2)["patch"]
        self.meet = Gather(self.door, self.axis, "meet", "meeting")

    def transport(self) -> dict[str, float]:
        """Latency in microseconds of a tiny exchange, and MiB per second each way of a large one."""
        import torch

        def median_seconds(x: torch.Tensor, repeats: int) -> float:
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                self.meet.same(x)
                times.append(time.perf_counter() - start)
            return statistics.median(times)

        return {
            "latency_us": 1e6 * median_seconds(torch.zeros(8), 500),
            "rate_mib_s": 4 / median_seconds(torch.zeros(1 << 20), 50),
        }

    def measure(self, model: str, plan: str, repeats: int) -> dict[str, object]:
        """Times of plain and split steps in turn, their difference, and bytes sent per step."""
        import torch

        denoiser, args, kwargs = large() if model == "large" else embedded()
        plain, split = denoiser.forward, self._split(copy.deepcopy(denoiser), plan)
        with torch.no_grad():
            want, got = plain(*args, **kwargs)[0], split(*args, **kwargs)[0]
            singles, pairs = [], []
            for _ in range(repeats):
                singles.append(self._timed(plain if self.context.rank == 0 else None, args, kwargs))
                self.door.traffic.clear()
                pairs.append(self._timed(split, args, kwargs))
        return {
            "single": singles,
            "pair": pairs,
            "error": ((got - want).norm() / want.norm()).item(),
            "bytes": self.door.traffic.total_bytes - self.door.traffic.bytes_sent["meet"],
            "waited": sum(seconds for kind, seconds in self.door.traffic.seconds_waited.items() if kind != "meet"),
        }

    def _timed(self, step, args, kwargs) -> float:
        import torch

        self.meet.same(torch.zeros(1))
        start = time.perf_counter()
        if step is not None:
            step(*args, **kwargs)
        return time.perf_counter() - start

    def _split(self, denoiser, plan: str):
        from functools import partial

        from patchpar.clock import StepClock
        from patchpar.strategies.exact import ExactPatch
        from patchpar.strategies.guidance import GuidanceSplit

        forward = denoiser.forward
        if plan == "patch=2":
            return partial(ExactPatch().install(denoiser, self.door, self.axis).denoise, forward)
        guidance = GuidanceSplit(self.door, self.axis, StepClock(guided=True))
        return partial(guidance.denoise, forward)


def large():
    """An SDXL-type UNet of 94 M parameters on 96 x 96 latents."""
    import torch
    from diffusers import UNet2DConditionModel

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
    import torch
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(
        embedded_model(), subfolder="unet", variant="fp16", torch_dtype=torch.float32
    )
    pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
    return unet.eval(), *_inputs(128, unet.config.cross_attention_dim, pooled)


def _inputs(latent: int, context: int, pooled: int):
    import torch

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
    parser.add_argument("--plan", choices=PLANS, action="append")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    titles = [
        "model",
        "plan",
        "1 process, s",
        "2 ranks, s",
        "ratio",
        "target",
        "MiB sent per step",
        "waited, ms",
        "error",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    with LocalExecutor(["cpu", "cpu"], "benchmarks.scaling:Bench", preload=("patchpar.engine",)) as ranks:
        link = ranks.call("transport")[0]
        for model in options.model or MODELS:
            for plan in options.plan or PLANS:
                result = ranks.call("measure", model, plan, options.repeats, expected=600.0)[0]
                lines.append(row(model, plan, result))
    foot = (
        f"Bare transport beside it: {link['latency_us']:.0f} us per exchange, {link['rate_mib_s']:.0f} MiB/s each way."
    )
    intro = "Seconds per denoising step with guidance, one process of one thread and two ranks of one thread in turn:"
    text = "\n".join(["# Two ranks against one process", "", intro, "", *lines, "", foot])
    print(text)
    if options.write:
        options.write.write_text(text + "\n")


def row(model: str, plan: str, result: dict) -> str:
    """One line of the table."""
    single, pair = statistics.median(result["single"]), statistics.median(result["pair"])
    ratio = statistics.median(one / two for one, two in zip(result["single"], result["pair"], strict=True))
    return (
        f"| {model} | {plan} | {single:.3f} | {pair:.3f} | {ratio:.2f} | {TARGETS[model, plan]} | "
        f"{result['bytes'] / 2**20:.2f} | {1e3 * result['waited']:.1f} | {result['error']:.1e} |"
    )


if __name__ == "__main__":
    main()
