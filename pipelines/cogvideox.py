"""CogVideoX on four GPUs: guidance on two halves, tokens of the video on two GPUs each."""

import av
import torch

from patchpar import ParallelPipeline, Plan

MODEL = "THUDM/CogVideoX-5b"
PLAN = Plan(cfg=2, patch=2)
VIDEO = {"num_frames": 49, "num_inference_steps": 50, "output_type": "np"}


def build(plan: Plan = PLAN) -> ParallelPipeline:
    """Open it in bfloat16 on as many GPUs as the plan takes."""
    return ParallelPipeline.from_pretrained(MODEL, devices=plan.world_size, plan=plan, torch_dtype=torch.bfloat16)


def main() -> None:
    """Generate one video and print the statistics."""
    with build() as pipe:
        frames = pipe(
            "a panda plays the guitar in a bamboo forest",
            guidance_scale=6.0,
            generator=torch.Generator("cpu").manual_seed(0),
            **VIDEO,
        ).frames[0]
        print(pipe.explain(), pipe.last_run, sep="\n")  # noqa: T201
    with av.open("cogvideox.mp4", "w") as file:
        stream = file.add_stream("libx264", rate=8, width=frames.shape[2], height=frames.shape[1], pix_fmt="yuv420p")
        for frame in (frames * 255).round().astype("uint8"):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


if __name__ == "__main__":
    main()
