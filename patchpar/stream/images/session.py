"""A stream of images as its user holds it: frames or requests in, images out in the same order."""

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
        """One more image, with these arguments of the pipeline beside those of the stream; its number.

        Raises PlanError if the stream has ended, or no image is taken for a minute.
        """
        with self._changed:
            self._driver.wait_for_room()
            self._check_running()
            return self._driver.push({**self._arguments, **arguments})

    def push_frame(self, image: Any, **arguments: Any) -> int:
        """`push(image=image)`: the next frame of a camera, a video or a folder."""
        return self.push(image=image, **arguments)

    def map(self, requests: Iterable[Mapping[str, Any]]) -> Iterator[ImageResult]:
        """Push all of these and give what comes out, as fast as there is credit. The stream ends with them."""
        for arguments in requests:
            while self._driver.has_waiting and not self.is_over:
                if (result := next(self, None)) is None:
                    return
                yield result
            self.push(**arguments)
        self.stop()
        yield from self

    def set(self, **arguments: Any) -> int:
        """Other arguments for all further images, such as `prompt`; the number of the first of them."""
        with self._changed:
            self._check_running()
            self._arguments.update(arguments)
            return self._driver.number

    @property
    def dropped(self) -> int:
        """Frames that a newer one has replaced, and images lost to a slow consumer or flushed."""
        return self._driver.replaced + super().dropped

    def _check_running(self) -> None:
        if not self._driver.takes_more:
            raise PlanError("this stream takes no more images: begin another one")

    def _effect(self, number: int) -> int:
        return number
