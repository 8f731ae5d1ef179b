"""A pipeline's own loop, run on every rank, of which each rank computes some denoiser calls and is given those before.

    rank 0    0 1 | stop                     computes calls 0 and 1, hands their results on, begins the next image
    rank 1    . . 2 3 | stop                 is given 0 and 1
    rank 2    . . . . 4 5 image            is given 0 to 3, ends the loop and decodes
      or      . . . . 4 5 | stop             and another rank is given 0 to 5, and decodes

Schedulers, guidance and noise are diffusers' own and see what they would see in one process, so that the image is the
same to the last bit. What every rank repeats is all that is not the denoiser: text and image encoders, the scheduler.
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
    """Ends a pipeline's loop where our calls end. No error: pipelines that catch errors must let it pass."""


class StepAssignment:
    """Which denoiser calls of a run are ours. Before `record` has been used nothing is known of a run.

    `beat` is called at every denoiser call, so that who watches this rank sees it at work.
    """

    def __init__(self, beat: Callable[[str], object]) -> None:
        self._beat = beat
        self._trees: list[Any] = []  # what each call returns, its tensors empty
        self._own: range | None = None
        self._ends = True
        self._given: list[Tensor] = []
        self._specs: list[tuple[TensorSpec, ...]] = []
        self._number = 0
        self.made: list[Tensor] = []

    @property
    def calls(self) -> int:
        """Denoiser calls of one run."""
        return len(self._trees)

    def specs(self, calls: range) -> tuple[TensorSpec, ...]:
        """What these calls return, one after another."""
        return tuple(spec for call in calls for spec in self._specs[call])

    def record(self, run: Callable[[], Any]) -> Any:
        """A whole run, of which is remembered what its calls return."""
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
                f"an image took {self._number} denoiser calls, the first one {self.calls}: the number of steps and "
                "guidance must stay the same throughout a stream"
            )
        return result

    def call(self, forward: Callable[[], Any]) -> Any:
        """One denoiser call: computed, or given, or the end."""
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
        if number >= own.stop:  # of a run that ends here, which has one call too many
            raise LoopHandedOver
        result = forward()
        self.made += [x.clone() for x in tensors_in(result)]  # pipelines may change it where it lies
        if self._number == own.stop and not self._ends:
            raise LoopHandedOver
        return result


class StepHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Stands before a denoiser's forward."""

    def __init__(self, assignment: StepAssignment) -> None:
        super().__init__()
        self._run_own_steps = assignment

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the denoiser's forward."""
        return self._run_own_steps.call(lambda: self.fn_ref.original_forward(*args, **kwargs))


@contextmanager
def shared_steps(pipe: Any, beat: Callable[[str], object]) -> Iterator[StepAssignment]:
    """A StepAssignment before all denoisers of a pipeline, while open. Raises UnsupportedModel."""
    denoisers = list(denoisers_of(pipe).values())
    if not denoisers:
        raise UnsupportedModel(
            f"a {type(pipe).__name__} has no unet, transformer, decoder or prior, so there are no steps to share"
        )
    for denoiser in denoisers:
        if getattr(denoiser, "is_cache_enabled", False):
            raise UnsupportedModel("a cache between steps would see some of them only: call disable_cache() first")
    assignment = StepAssignment(beat)
    with HookSet() as hooks:
        for denoiser in denoisers:
            hooks.install(denoiser, StepHook(assignment), HOOK)
        yield assignment
