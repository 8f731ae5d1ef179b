"""`ImageStreamingPipeline`: any image pipeline of diffusers as a stream of images, on several ranks in turn.

Of its sessions frames or requests go in, and images come out in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.slurm import resolve_devices_of_task
from patchpar.models.files import resolve_model
from patchpar.stream.base_session import BaseSession
from patchpar.stream.images.driver import ImageDriver, ImageResult, ImageStreamOptions, Intake
from patchpar.stream.rank_driver import Output
from patchpar.stream.worker_group import HeldRanks, Ranks, start_ranks

ENGINE = "patchpar.stream.images.runner:ImageRunner"


class ImageSession(BaseSession[ImageDriver, ImageResult, int]):
    """One stream of images. A context manager and an iterator, plain and async. Controls return an image's number."""

    def __init__(self, run: Callable[..., Any], options: ImageStreamOptions, arguments: Mapping[str, Any]) -> None:
        driver = ImageDriver(run, options, lambda result: self._outputs.put(result))
        super().__init__(driver, options.output, options.lead)
        self._arguments = dict(arguments)
        driver.start()

    def push(self, **arguments: Any) -> int:
        """Request one more image, with these pipeline arguments in addition to those of the stream. Returns its number.

        Raises PlanError if the stream has ended, or no image is taken for a minute.
        """
        with self._changed:
            self._driver.wait_for_room()
            self._check_running()
            return self._driver.push({**self._arguments, **arguments})

    def push_frame(self, image: Any, **arguments: Any) -> int:
        """Push the next frame of a camera, a video or a folder: `push(image=image)`."""
        return self.push(image=image, **arguments)

    def map(self, requests: Iterable[Mapping[str, Any]]) -> Iterator[ImageResult]:
        """Push all of these, as fast as there is credit, and yield their images. The stream ends with them."""
        for arguments in requests:
            while self._is_full():
                if (result := next(self, None)) is None:
                    return
                yield result
            with self._changed:
                if not self._driver.takes_more:
                    break  # it was stopped, or its error comes below
                self.push(**arguments)
        self.stop()
        yield from self

    def set(self, **arguments: Any) -> int:
        """Set arguments such as `prompt` for all further images; returns the number of the first of them.

        Raises PlanError once the stream takes no more images.
        """
        with self._changed:
            self._check_running()
            self._arguments.update(arguments)
            return self._driver.number

    @property
    def dropped(self) -> int:
        """Frames that a newer one has replaced, and images dropped for a slow consumer or flushed."""
        return self._driver.replaced + super().dropped

    def _is_full(self) -> bool:
        """Wait until an image can be pushed, or one that is ready has to be taken first; returns whether it has to."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._outputs) or not self._driver.has_waiting or self.is_over)
            return self._driver.has_waiting and not self.is_over

    def _check_running(self) -> None:
        if not self._driver.takes_more:
            raise PlanError("this stream takes no more images: begin another one")

    def _effect(self, number: int) -> int:
        return number


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
