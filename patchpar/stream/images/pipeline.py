"""`ImageStreamingPipeline`: any image pipeline of diffusers as a stream of images, on several ranks in turn."""

from pathlib import Path
from typing import Any

from patchpar.launch.devices import resolve_devices
from patchpar.models.files import resolve_model
from patchpar.stream.images.driver import ImageStreamOptions, Intake
from patchpar.stream.images.session import ImageSession
from patchpar.stream.rank_driver import Output
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
        names = resolve_devices(devices).names
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
        ranks = "closed" if self._ranks is None else f"{self._ranks.world_size} ranks"
        return f"<ImageStreamingPipeline of {self._name}, {ranks}>"
