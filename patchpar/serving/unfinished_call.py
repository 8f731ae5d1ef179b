"""What a suspended request has reached: finished images, and the denoiser calls of the one that is not."""

import threading
from contextlib import suppress

from patchpar.errors import PatchparError
from patchpar.pipeline.job import PipelineJob
from patchpar.pipeline.report import Run
from patchpar.pipeline.suspended_call import SuspendedCall
from patchpar.serving.partial_images import CompletedImage, PartialImages


class UnfinishedCall:
    """`done`: finished images, in order. `suspended`: the next one; None if it has not begun.

    The thread that ends the server may take a snapshot while that of the request goes on.
    """

    def __init__(self, done: tuple[CompletedImage, ...] = (), suspended: SuspendedCall | None = None) -> None:
        self.done = list(done)
        self.suspended = suspended
        self.runs: list[Run] = []
        """Statistics of the calls of this process that have made finished images, also before it was suspended."""
        self._lock = threading.Lock()
        self.partial = 0, 0
        """Of the next image: the last step whose latents have come, and how many partial images were sent."""
        self._latents: PartialImages | None = None
        self._call: PipelineJob | None = None

    @property
    def done_steps(self) -> int:
        """Steps of the finished images."""
        return sum(each.figures.steps for each in self.done)

    def watch(self, latents: PartialImages) -> None:
        """Note who receives latents of the next image."""
        self._latents = latents

    def begin(self, call: PipelineJob) -> None:
        """Note the call of the pipeline that makes the next image, from where it was suspended if it was."""
        with self._lock:
            self._call, self.suspended = call, None

    def snapshot(self) -> "UnfinishedCall":
        """Return what is there now, also of a call that has not come to its next denoiser call."""
        with self._lock:  # else the image of the call may be among the finished ones, and the next one go on with it
            call, suspended = self._call, self.suspended
            if suspended is None and call is not None:
                suspended = call.snapshot()
            found = UnfinishedCall(tuple(self.done), suspended)
            found.partial = self.partial
        return found

    def suspend(self, call: PipelineJob) -> None:
        """Keep a call of the pipeline that was suspended."""
        try:
            suspended = call.suspend(timeout=0)
        except (PatchparError, TimeoutError):
            suspended = None  # it starts from its beginning
        with self._lock:
            self.suspended, self._call = suspended, None  # whose arguments may be large
            if self._latents is not None:
                self.partial = self._latents.after, self._latents.sent

    def finish(self, image: CompletedImage) -> None:
        """Keep a finished image."""
        with self._lock:
            self.done.append(image)
            self.suspended, self.partial, self._latents, self._call = None, (0, 0), None, None


def ask_to_suspend(call: PipelineJob) -> None:
    """Let a call end before its next denoiser call, without waiting for it."""
    with suppress(TimeoutError, PatchparError):  # what the call raises is raised where it is waited for
        call.suspend(timeout=0)
