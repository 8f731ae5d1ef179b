"""`PictureStreamingPipeline`: any image pipeline of diffusers as a stream of pictures, its steps on several ranks."""

from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.devices import resolve_devices
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.models.folder import resolve_model
from patchpar.stream.picture_session import Intake, PictureManner, PictureSession

ENGINE = "patchpar.stream.picture_engine:PictureEngine"
LOAD_SECONDS = 600.0


class PictureStreamingPipeline:
    """An image pipeline that streams. Made by `from_pretrained`; a context manager."""

    def __init__(self, executor: LocalExecutor | InlineExecutor, name: str) -> None:
        self._executor: LocalExecutor | InlineExecutor | None = executor
        self._name = name
        self._session: PictureSession | None = None

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, devices: object = "auto", deadline: float = 60.0, **options: Any
    ) -> "PictureStreamingPipeline":
        """Load the same pipeline on every device. Options are those of diffusers' from_pretrained.

        `deadline`: seconds that a rank may wait for another. Raises PlanError, LaunchError.
        """
        path, options, _ = resolve_model(model, options)
        names = resolve_devices(devices).names
        executor: LocalExecutor | InlineExecutor = InlineExecutor(names[0], ENGINE, deadline=deadline)
        if len(names) > 1:
            executor = LocalExecutor(names, ENGINE, deadline=deadline, preload=["patchpar.stream.picture_engine"])
        try:
            name = executor.call("load", path, options, replay=True, expected=LOAD_SECONDS)[0]
        except BaseException:
            executor.close()
            raise
        return cls(executor, name)

    def stream(self, *, seed: int = 0, intake: Intake = "all", lead: int = 2, **arguments: Any) -> PictureSession:
        """Begin a stream of pictures with these arguments of the pipeline, such as `prompt` and `num_inference_steps`.

        Each `push(image=...)`, or each entry of `map`, gives one picture, the very one of `pipe(image=...,
        **arguments)` with a CPU generator of `seed`. `intake`: see PictureManner; `lead`: pictures that may be ready
        beyond those under way. The number of denoiser calls is that of the first picture throughout. Raises PlanError.
        """
        if self._executor is None:
            raise PlanError("this pipeline is closed; make a new one")
        if self._session is not None:
            self._session.close()
        ranks = self._executor.world_size
        manner = PictureManner(ranks=ranks, seed=seed, intake=intake, credit=ranks + lead)
        self._session = PictureSession(partial(self._executor.call, "run"), manner, arguments)
        return self._session

    def close(self) -> None:
        """End stream and workers. Idempotent."""
        executor, self._executor = self._executor, None
        if self._session is not None:
            self._session.close()
        if executor is not None:
            executor.close()

    def __repr__(self) -> str:
        ranks = "closed" if self._executor is None else f"{self._executor.world_size} ranks"
        return f"<PictureStreamingPipeline of {self._name}, {ranks}>"

    def __enter__(self) -> "PictureStreamingPipeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
