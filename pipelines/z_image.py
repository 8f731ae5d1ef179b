"""Z-Image Turbo on two GPUs. It is distilled, runs without guidance in few steps, and shares its tokens."""

import torch

from patchpar import ParallelPipeline, Plan

MODEL = "Tongyi-MAI/Z-Image-Turbo"
PLAN = Plan(patch=2)


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16 on as many GPUs as the plan takes."""
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=torch.bfloat16)


def main() -> None:
    """Generate one image and print the statistics."""
    with build() as pipe:
        image = pipe(
            "a paper boat on a rainy street, shallow depth of field",
            height=1536,
            width=1536,
            num_inference_steps=9,
            guidance_scale=0.0,
            generator=torch.Generator("cpu").manual_seed(0),
        ).images[0]
        image.save("z_image.png")
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
