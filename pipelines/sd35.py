"""Stable Diffusion 3.5 large on four GPUs: guidance on two halves, the image's tokens on two GPUs each."""

import torch

from patchpar import ParallelPipeline, Plan

MODEL = "stabilityai/stable-diffusion-3.5-large"
PLAN = Plan(cfg=2, patch=2)


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16 on as many GPUs as the plan takes."""
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=torch.bfloat16)


def main() -> None:
    """Generate one image and print the statistics."""
    with build() as pipe:
        image = pipe(
            "a lighthouse in a storm, oil on canvas",
            height=1024,
            width=1024,
            num_inference_steps=28,
            guidance_scale=3.5,
            generator=torch.Generator("cpu").manual_seed(0),
        ).images[0]
        image.save("sd35.png")
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
