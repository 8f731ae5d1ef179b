"""Qwen-Image on eight GPUs: guidance, which its negative prompt turns on, on two halves, tokens on four GPUs each."""

import torch

from patchpar import ParallelPipeline, Plan

MODEL = "Qwen/Qwen-Image"
PLAN = Plan(cfg=2, patch=4)


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16 on as many GPUs as the plan takes."""
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=torch.bfloat16)


def main() -> None:
    """Generate one image and print the statistics."""
    with build() as pipe:
        image = pipe(
            'a bookshop at dusk, the sign above its door says "Open late"',
            negative_prompt=" ",
            true_cfg_scale=4.0,
            height=928,
            width=1664,
            num_inference_steps=50,
            generator=torch.Generator("cpu").manual_seed(0),
        ).images[0]
        image.save("qwen_image.png")
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
