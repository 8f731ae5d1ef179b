"""The embedded model on two devices: one guidance branch on each."""

from patchpar import ParallelPipeline, Plan

PROMPT = "a red house on the left and a pine on the right, green hills at sunset"


def build(plan: Plan | str = "auto") -> ParallelPipeline:
    """Open the embedded model on as many devices as the plan takes; two for 'auto'."""
    devices = plan.world_size if isinstance(plan, Plan) else 2
    return ParallelPipeline.from_pretrained("embedded", devices=devices, plan=plan)


def main() -> None:
    """Generate one image and print the statistics."""
    with build() as pipe:
        pipe(PROMPT, num_inference_steps=25).images[0].save("scene.png")
        print(pipe.last_run)  # noqa: T201


if __name__ == "__main__":
    main()
