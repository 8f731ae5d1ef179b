"""Denoiser calls of a pipeline divided among ranks. Every rank runs the pipeline's own loop and computes some calls.

    rank 0    0 1 | stop                     computes calls 0 and 1, sends their results, begins the next image
    rank 1    . . 2 3 | stop                 receives the results of 0 and 1
    rank 2    . . . . 4 5 image              receives 0 to 3, ends the loop and decodes
      or      . . . . 4 5 | stop             and another rank receives 0 to 5, and decodes

Schedulers, guidance and noise are diffusers' own and get the same values as in one process, so that the image is
bit-equal. Every rank repeats everything but the denoiser: text and image encoders, the scheduler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn

from patchpar.comm.pytree import tensors_in, with_tensors
from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.info import denoisers_of
from patchpar.shard.hooks import HookSet

HOOK = "patchpar_steps"


class LoopHandedOver(BaseException):
    """Ends a pipeline's loop after this rank's calls. A BaseException, so that no pipeline catches it as an error."""


class StepAssignment:
    """This rank's denoiser calls of an image; `record` comes before `run`. `beat`: called at each, as a heartbeat."""

    def __init__(self, beat: Callable[[str], object]) -> None:
        self._beat = beat
        self._trees: list[Any] = []  # outputs of each call with empty tensors
        self._own: range | None = None
        self._ends = True
        self._given: list[Tensor] = []
        self._specs: list[tuple[TensorSpec, ...]] = []
        self._number = 0
        self.made: list[Tensor] = []

    @property
    def calls(self) -> int:
        """Denoiser calls of one image."""
        return len(self._trees)

    def specs(self, calls: range) -> tuple[TensorSpec, ...]:
        """Return shapes and dtypes of the output tensors of these calls, in order."""
        return tuple(spec for call in calls for spec in self._specs[call])

    def record(self, run: Callable[[], Any]) -> Any:
        """Run the whole pipeline and record the structure and shapes of the denoiser's outputs."""
        self._trees, self._specs, self._own, self._number = [], [], None, 0
        return run()

    def run(self, run: Callable[[], Any], own: range, given: list[Tensor], *, ends: bool) -> Any:
        """Run the pipeline and compute only the calls `own`. Returns its result if the image `ends` here, else None.

        `given`: output tensors of all earlier calls, each of any shape. Afterwards `made` holds those of this rank's
        calls. Raises PlanError if the number of calls differs from the first run.
        """
        self._own, self._ends, self._given, self._number, self.made = own, ends, given, 0, []
        result = None
        with suppress(LoopHandedOver):
            result = run()
        if self._number != own.stop or (result is None) == ends:
            raise PlanError(
                f"an image took {self._number} denoiser calls, the first one {self.calls}: keep the number of steps "
                "and guidance the same throughout a stream"
            )
        return result

    def call(self, forward: Callable[[], Any]) -> Any:
        """Handle one denoiser call: compute it, return the received output, or raise LoopHandedOver."""
        number, own = self._number, self._own
        self._beat("denoiser")
        self._number += 1
        if own is None:
            result = forward()
            tensors = tensors_in(result)
            self._trees.append(with_tensors(result, [torch.empty(0)] * len(tensors)))
            self._specs.append(tuple(map(TensorSpec.of, tensors)))
            return result
        if number < own.start:
            before = len(self.specs(range(number)))
            return with_tensors(self._trees[number], self._given[before : before + len(self._specs[number])])
        if number >= own.stop:  # the image ends here, but there is one call too many
            raise LoopHandedOver
        result = forward()
        self.made += [x.clone() for x in tensors_in(result)]  # pipelines may change it in place
        if self._number == own.stop and not self._ends:
            raise LoopHandedOver
        return result


class StepHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Passes a denoiser's forward calls to a StepAssignment."""

    def __init__(self, assignment: StepAssignment) -> None:
        super().__init__()
        self._run_own_steps = assignment

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replace the denoiser's forward."""
        return self._run_own_steps.call(lambda: self.fn_ref.original_forward(*args, **kwargs))


@contextmanager
def shared_steps(pipe: Any, beat: Callable[[str], object]) -> Iterator[StepAssignment]:
    """Install a StepAssignment on all denoisers of a pipeline, for the `with` block. Raises UnsupportedModel."""
    denoisers = list(denoisers_of(pipe).values())
    if not denoisers:
        raise UnsupportedModel(
            f"a {type(pipe).__name__} has no unet, transformer, decoder or prior, so there are no steps to divide"
        )
    for denoiser in denoisers:
        if getattr(denoiser, "is_cache_enabled", False):
            raise UnsupportedModel(
                "a cache between steps is enabled, but each rank computes some steps only: call disable_cache() first"
            )
    assignment = StepAssignment(beat)
    with HookSet() as hooks:
        for denoiser in denoisers:
            hooks.install(denoiser, StepHook(assignment), HOOK)
        yield assignment
