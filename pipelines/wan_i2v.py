"""Wan 2.2 on eight GPUs, image to video: guidance on two halves, tokens of the video on four GPUs each."""

import av
import torch
from PIL import Image

from patchpar import ParallelPipeline, Plan

MODEL = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
PLAN = Plan(cfg=2, patch=4)
VIDEO = {"height": 480, "width": 832, "num_frames": 81, "num_inference_steps": 40, "output_type": "np"}


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16, but for the VAE, on as many GPUs as the plan takes."""
    dtype = {"default": torch.bfloat16, "vae": torch.float32}
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=dtype)


def main() -> None:
    """Generate one video and print the statistics."""
    with build() as pipe:
        frames = pipe(
            Image.open("image.png").convert("RGB").resize((832, 480)),
            prompt="the camera moves slowly to the right",
            negative_prompt="overexposed, static, worst quality",
            guidance_scale=3.5,
            generator=torch.Generator("cpu").manual_seed(0),
            **VIDEO,
        ).frames[0]
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201
    with av.open("wan_i2v.mp4", "w") as file:
        stream = file.add_stream("libx264", rate=16, width=frames.shape[2], height=frames.shape[1], pix_fmt="yuv420p")
        for frame in (frames * 255).round().astype("uint8"):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


if __name__ == "__main__":
    main()
