"""DiT-XL/2, which generates classes of ImageNet, on two GPUs: one with the class, one without."""

import torch

from patchpar import ParallelPipeline, Plan

MODEL = "facebook/DiT-XL-2-512"
PLAN = Plan(cfg=2)


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in float16 on as many GPUs as the plan takes."""
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=torch.float16)


def main() -> None:
    """Generate one image and print the statistics."""
    with build() as pipe:
        image = pipe(
            class_labels=[437],  # lighthouse
            num_inference_steps=50,
            guidance_scale=4.0,
            generator=torch.Generator("cpu").manual_seed(0),
        ).images[0]
        image.save("dit.png")
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
