"""Stable Diffusion XL at 2048 x 2048 on all GPUs: guidance on two halves, bands of the latent within each."""

import torch

from patchpar import ParallelPipeline, Plan

MODEL = "stabilityai/stable-diffusion-xl-base-1.0"


def build(plan: Plan | str = "auto") -> ParallelPipeline:
    """Open SDXL in half precision on as many GPUs as the plan takes; all of them for 'auto'."""
    devices = plan.world_size if isinstance(plan, Plan) else "auto"
    return ParallelPipeline.from_pretrained(
        MODEL, devices=devices, plan=plan, torch_dtype=torch.float16, variant="fp16"
    )


def main() -> None:
    """Generate one image and print the statistics."""
    with build() as pipe:
        generator = torch.Generator("cpu").manual_seed(0)
        image = pipe("a lighthouse in a storm", height=2048, width=2048, generator=generator).images[0]
        image.save("lighthouse.png")
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
