"""HunyuanVideo on eight GPUs. It is distilled and makes one call in a step: all GPUs share the tokens."""

import av
import torch
from diffusers import AutoencoderKLHunyuanVideo

from patchpar import ParallelPipeline, Plan

MODEL = "hunyuanvideo-community/HunyuanVideo"
PLAN = Plan(patch=8)
VIDEO = {"height": 544, "width": 960, "num_frames": 61, "num_inference_steps": 30, "output_type": "np"}


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16 on as many GPUs as the plan takes. The VAE works in tiles, or it would need most memory."""
    vae = AutoencoderKLHunyuanVideo.from_pretrained(MODEL, subfolder="vae", torch_dtype=torch.bfloat16)
    vae.enable_tiling()
    options = {"vae": vae, "torch_dtype": torch.bfloat16}
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, **options)


def main() -> None:
    """Generate one video and print the statistics."""
    with build() as pipe:
        frames = pipe(
            "a cat walks on the grass, realistic",
            generator=torch.Generator("cpu").manual_seed(0),
            **VIDEO,
        ).frames[0]
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201
    with av.open("hunyuan_video.mp4", "w") as file:
        stream = file.add_stream("libx264", rate=15, width=frames.shape[2], height=frames.shape[1], pix_fmt="yuv420p")
        for frame in (frames * 255).round().astype("uint8"):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


if __name__ == "__main__":
    main()
