"""Is a model a fit instrument for measuring parallel strategies? One process, no ranks.

    python -m benchmarks.sensitivity --model assets/scenes-unet --strips 4

The latent is cut into strips of rows. Every convolution, group norm and self-attention of the UNet is then computed
strip by strip, as on ranks, with the other strips' values either missing ("off") or one step old ("stale"), one kind of
exchange at a time while everything else is exact. A model on which a missing exchange costs little can tell nothing
about strategies. Prints dB of the images against the exact run, a verdict per bar; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.image_quality import psnr_db
from patchpar.models.files import inspect_folder

CAPTIONS = (
    "a red house on the left and a tree on the right, green hills at noon",
    "a blue tower on the right and a pine on the left, snowy mountains at sunset",
    "a yellow balloon on the right, desert dunes at noon",
    "a purple house on the right and a pine on the left, a calm lake at night",
    "a red tower on the left and a white house on the right, a calm lake at noon",
    "an orange balloon on the left and a tree on the right, snowy mountains at night",
    "a tree on the left and a blue house on the right, desert dunes at sunset",
    "a white tower on the right, a calm lake at sunset",
)
KINDS = ("halo", "moments", "keys and values")
LEAST_COST_DB, MOST_NAIVE_DB, LEAST_COSINE = 3.0, 18.0, 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How images are made, how many strips there are, and how many first steps stay exact."""

    captions: int
    side: int
    steps: int
    guidance: float
    strips: int
    warmup: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One condition with the figure it was judged by."""

    name: str
    figure: str
    met: bool


@dataclass(slots=True, kw_only=True)
class Cut:
    """A forward hook that computes one module strip by strip once the warm-up is over.

    Rows, or tokens in row order, lie along dim. Stale keeps the whole input of the last step for the strips' context.
    """

    dim: int
    strips: int
    warmup: int
    stale: bool
    calls: int = 0
    last: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple, kwargs: dict, output: Tensor) -> Tensor | None:
        """The module's output as ranks would have it, or None to leave it as it is."""
        whole, before = inputs[0], self.last
        self.calls += 1
        self.last = whole if self.stale else None
        if self.calls <= self.warmup:
            return None
        if whole.shape[self.dim] % self.strips:
            raise ValueError(f"{whole.shape[self.dim]} rows or tokens do not make {self.strips} strips: use fewer")
        parts = whole.chunk(self.strips, self.dim)
        if not self.stale:
            return torch.cat(module.forward(torch.cat(parts), *inputs[1:], **kwargs).chunk(self.strips), self.dim)
        return torch.cat([self._beside_old(module, rank, parts, before) for rank in range(self.strips)], self.dim)

    def _beside_old(self, module: nn.Module, rank: int, parts: Sequence[Tensor], before: Tensor) -> Tensor:
        mixed = list(before.chunk(self.strips, self.dim))
        mixed[rank] = parts[rank]
        return module.forward(torch.cat(mixed, self.dim)).chunk(self.strips, self.dim)[rank]


def kind_of(name: str, module: nn.Module) -> str | None:
    """Which exchange this module needs on ranks, or None."""
    if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1:
        return "halo"
    if isinstance(module, nn.GroupNorm):
        return "moments"
    return "keys and values" if name.endswith("attn1") else None


@contextmanager
def cut(unet: nn.Module, kinds: Sequence[str], settings: Settings, *, stale: bool) -> Iterator[None]:
    """Compute the modules that need these kinds of exchange strip by strip."""
    with ExitStack() as hooks:
        for name, module in unet.named_modules():
            kind = kind_of(name, module)
            if kind in kinds:
                dim = 1 if kind == "keys and values" else 2
                hook = Cut(dim=dim, strips=settings.strips, warmup=settings.warmup, stale=stale)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


@dataclass(slots=True)
class NoiseLog:
    """A forward hook on the UNet that keeps the noise each step predicts for the captions' branch."""

    alphas: Tensor
    noises: list[Tensor] = field(default_factory=list)

    def __call__(self, _module: nn.Module, inputs: tuple, _kwargs: dict, output: tuple) -> None:
        """Turn v into noise and keep it."""
        noisy, alpha = inputs[0], self.alphas[int(inputs[1])]
        noise = alpha.sqrt() * output[0] + (1 - alpha).sqrt() * noisy
        self.noises.append(noise.chunk(2)[1])


def cosines(noises: Sequence[Tensor]) -> list[float]:
    """Cosine similarity of the noises (B, C, H, W) of neighbouring steps, worst caption."""
    pairs = itertools.pairwise(noises)
    return [functional.cosine_similarity(a.flatten(1), b.flatten(1)).min().item() for a, b in pairs]


def images(pipe: DiffusionPipeline, settings: Settings) -> Tensor:
    """One image (3, H, W) in 0..1 per caption, the same noise on every call."""
    return pipe(
        list(CAPTIONS[: settings.captions]),
        height=settings.side,
        width=settings.side,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in range(settings.captions)],
        output_type="pt",
    ).images


def measure(pipe: DiffusionPipeline, settings: Settings) -> list[Bar]:
    """Run everything, print as it goes, judge."""
    log = NoiseLog(pipe.scheduler.alphas_cumprod)
    handle = pipe.unet.register_forward_hook(log, with_kwargs=True)
    exact = images(pipe, settings)
    handle.remove()
    bars = [cosine_bar(cosines(log.noises)), _terminal_bar(pipe.scheduler.alphas_cumprod[-1].item())]
    for kind in KINDS:
        found = {}
        for stale in (True, False):
            with cut(pipe.unet, [kind], settings, stale=stale):
                found[stale] = psnr_db(images(pipe, settings), exact)
            print(f"{kind:16s} {'stale' if stale else 'off':6s} {found[stale]:6.2f} dB", flush=True)
        bars.append(cost_bar(kind, found))
    with cut(pipe.unet, KINDS, settings, stale=False):
        naive = psnr_db(images(pipe, settings), exact)
    print(f"{'naive':16s} {'off':6s} {naive:6.2f} dB", flush=True)
    return [*bars, Bar(name=f"naive <= {MOST_NAIVE_DB:g} dB", figure=f"{naive:.2f} dB", met=naive <= MOST_NAIVE_DB)]


def cost_bar(kind: str, found_db: Mapping[bool, float]) -> Bar:
    """Whether this kind missing (False) costs enough beside a stale one (True)."""
    cost = found_db[True] - found_db[False]
    return Bar(name=f"{kind} off costs >= {LEAST_COST_DB:g} dB", figure=f"{cost:.2f} dB", met=cost >= LEAST_COST_DB)


def cosine_bar(cosines: list[float]) -> Bar:
    """Whether neighbouring steps in the middle third predict much the same noise."""
    third = len(cosines) // 3
    least = min(cosines[third : len(cosines) - third])
    name = f"neighbouring noise predictions in the middle >= {LEAST_COSINE}"
    return Bar(name=name, figure=f"{least:.4f}", met=least >= LEAST_COSINE)


def _terminal_bar(alpha: float) -> Bar:
    ratio = alpha / (1 - alpha)
    return Bar(name="terminal SNR > 0", figure=f"{ratio:.5f}", met=ratio > 0)


def parse(description: str | None, folder: str) -> argparse.Namespace:
    """The command line; the model is that folder in assets where none is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[2] / "assets" / folder)
    parser.add_argument("--captions", type=int, choices=range(1, len(CAPTIONS) + 1), default=4, metavar="1..8")
    parser.add_argument("--size", type=int, default=256, help="side of the image in pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--strips", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1, help="first steps that stay exact")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def run(arguments: argparse.Namespace, measured: Callable[[DiffusionPipeline, Settings], list[Bar]]) -> int:
    """Measure and judge; 0 if every bar is met."""
    torch.set_num_threads(arguments.threads)
    absent = dict.fromkeys(inspect_folder(arguments.model, "fp16").absent)
    pipe = DiffusionPipeline.from_pretrained(arguments.model, variant="fp16", torch_dtype=torch.float32, **absent)
    pipe.set_progress_bar_config(disable=True)
    settings = Settings(
        captions=arguments.captions,
        side=arguments.size,
        steps=arguments.steps,
        guidance=arguments.guidance,
        strips=arguments.strips,
        warmup=arguments.warmup,
    )
    bars = measured(pipe, settings)
    for bar in bars:
        print(f"{'met   ' if bar.met else 'MISSED'} {bar.name}: {bar.figure}")
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(run(parse(__doc__, "scenes-unet"), measure))
