"""`ImageStreamingPipeline`: any image pipeline of diffusers as a stream of images, on several ranks in turn.

Of its sessions frames or requests go in, and images come out in the same order.
"""

from pathlib import Path
from typing import Any

from patchpar.launch.slurm import resolve_devices_of_task
from patchpar.models.files import resolve_model
from patchpar.stream.delivery import Output
from patchpar.stream.images.session import ImageSession, ImageStreamOptions, Intake
from patchpar.stream.worker_group import HeldRanks, Ranks, start_ranks

ENGINE = "patchpar.stream.images.runner:ImageRunner"


class ImageStreamingPipeline(HeldRanks[Ranks, ImageSession]):
    """An image pipeline for streams. Made by `from_pretrained`; a context manager."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        super().__init__(ranks)
        self._name = name

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        devices: object = "auto",
        takes_image: bool = False,
        deadline: float = 60.0,
        **options: Any,
    ) -> "ImageStreamingPipeline":
        """Load the same pipeline on every device. Other options are those of diffusers' from_pretrained.

        `takes_image`: if the model's own pipeline is text-to-image, use the image-to-image pipeline of its family.
        `deadline`: seconds that a rank may make no progress. Raises PlanError, LaunchError.
        """
        path, options, _ = resolve_model(model, options)
        names = resolve_devices_of_task(devices).names
        return cls(*start_ranks(names, ENGINE, deadline, (path, options, takes_image)))

    def stream(
        self,
        *,
        seed: int = 0,
        intake: Intake = "all",
        output: Output = "block",
        lead: int = 2,
        restarts: int = 3,
        **arguments: Any,
    ) -> ImageSession:
        """Begin a stream of images with these pipeline arguments, such as `prompt` and `num_inference_steps`.

        Each `push(image=...)`, or entry of `map`, gives one image, equal to `pipe(image=..., **arguments)` with a CPU
        generator of `seed`. Images are independent of one another, also in their sizes and numbers of steps. `intake`,
        `output`, `lead`, `restarts`: see ImageStreamOptions. Raises PlanError.
        """
        with self._begun() as executor:
            options = ImageStreamOptions(
                ranks=executor.world_size, seed=seed, intake=intake, output=output, lead=lead, restarts=restarts
            )
            self._session = ImageSession(
                lambda rank, **calls: executor.call("run", ranks=(rank,), **calls), options, arguments
            )
            return self._session

    def __repr__(self) -> str:
        size = 0 if self._ranks is None else self._ranks.world_size
        ranks = f"{size} rank{'s' if size > 1 else ''}" if size else "closed"
        return f"<ImageStreamingPipeline of {self._name}, {ranks}>"
