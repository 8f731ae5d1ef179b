"""Qwen-Image-Edit on eight GPUs: guidance on two halves, tokens of both images on four GPUs each."""

import torch
from PIL import Image

from patchpar import ParallelPipeline, Plan

MODEL = "Qwen/Qwen-Image-Edit"
PLAN = Plan(cfg=2, patch=4)


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16 on as many GPUs as the plan takes."""
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=torch.bfloat16)


def main() -> None:
    """Edit one image and print the statistics."""
    with build() as pipe:
        image = pipe(
            Image.open("image.png").convert("RGB"),
            prompt="make it snow",
            negative_prompt=" ",
            true_cfg_scale=4.0,
            num_inference_steps=50,
            generator=torch.Generator("cpu").manual_seed(0),
        ).images[0]
        image.save("qwen_image_edit.png")
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
