"""FLUX.1 [dev] on four GPUs. It is distilled and makes one call in a step: all GPUs share the tokens."""

import torch

from patchpar import ParallelPipeline, Plan

MODEL = "black-forest-labs/FLUX.1-dev"
PLAN = Plan(patch=4)


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16 on as many GPUs as the plan takes."""
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=torch.bfloat16)


def main() -> None:
    """Generate one image and print the statistics."""
    with build() as pipe:
        image = pipe(
            "a cat that holds a sign which says hello world",
            height=1280,
            width=1536,
            num_inference_steps=28,
            guidance_scale=3.5,
            generator=torch.Generator("cpu").manual_seed(0),
        ).images[0]
        image.save("flux.png")
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
