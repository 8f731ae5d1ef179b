"""FLUX.2 [dev] on eight GPUs that hold its 112 GB each. It is distilled: all GPUs share the tokens."""

import torch

from patchpar import ParallelPipeline, Plan

MODEL = "black-forest-labs/FLUX.2-dev"
PLAN = Plan(patch=8)


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16 on as many GPUs as the plan takes."""
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=torch.bfloat16)


def main() -> None:
    """Generate one image and print the statistics."""
    with build() as pipe:
        image = pipe(
            prompt="a cat that holds a sign which says hello world",
            height=2048,
            width=2048,
            num_inference_steps=28,
            guidance_scale=4.0,
            generator=torch.Generator("cpu").manual_seed(0),
        ).images[0]
        image.save("flux2.png")
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
