"""`ImageSession`: a stream of images, frames or requests in, images out in the same order."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from patchpar.errors import PlanError
from patchpar.stream.base_session import BaseSession
from patchpar.stream.images.driver import ImageDriver, ImageResult, ImageStreamOptions


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
