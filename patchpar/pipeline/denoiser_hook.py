"""Hook that replaces the forward of a denoiser."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from diffusers.hooks import ModelHook
from torch import nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import on_own_lists, with_own_lists
from patchpar.models.guiders import is_smoothed, step_branches
from patchpar.pipeline.installed_weights import InstalledWeights
from patchpar.plan.mesh import Axis
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.batch import count_branches, sample_of
from patchpar.shard.denoiser import SharedDenoiser
from patchpar.shard.foreign.check import ForeignCheck
from patchpar.shard.piped.on_stages import PipedOnStages
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.patches import StagedPatches
from patchpar.shard.stale.state import StaleState
from patchpar.shard.step_caches import CacheVote, cache_of, counts_calls
from patchpar.shard.tensor.denoiser import TensorDenoiser
from patchpar.shard.unsupported_model import (
    kept_by_processors,
    refuse_gradients,
    refuse_smoothed,
    refuse_what_processors_keep,
    refused_in_words,
)
from patchpar.strategies.cfg.split import GuidanceSplit
from patchpar.strategies.cfg.verify import GuidanceCheck
from patchpar.strategies.data.prompt_check import PromptCheck


class DenoiserHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Replaces a denoiser's forward and passes the call through the plan's layers, outermost first."""

    def __init__(
        self,
        clock: StepClock,
        layers: Sequence[Any],
        guided: Callable[[], bool | None],
        votes: CacheVote,
        check: GuidanceCheck | None = None,
        *,
        plan: Plan,
    ) -> None:
        super().__init__()
        self.clock, self.layers, self.guided = clock, tuple(layers), guided
        self.votes, self.check, self.plan, self._watched = votes, check, plan, False
        self.pipe: Any = None
        """The pipeline, which knows how many guidance branches a step has."""
        self.weights: InstalledWeights | None = None
        """What shards the denoiser's weights before its first call, if the plan says so."""
        self.tensor: TensorDenoiser | None = None
        """What divides the denoiser's features before its first call, if the plan says so."""
        self.stages: StagedDenoiser | None = None
        """What runs the denoiser's own forward, if the plan divides its blocks."""
        self.divided: PipedOnStages | StagedPatches | None = None
        """What runs it in these stages piece by piece, or on a patch of the image, if the plan says so."""
        self.prompts: PromptCheck | None = None
        """What compares foreign code with a call for all prompts, if the plan divides these."""
        self._looked: int | None = None  # the evaluation of this image in which the denoiser was last inspected
        self._by_branch: Sequence[nn.Module] = ()
        self.comm, self.deadline = votes.comm, votes.comm.transport.deadline

    def divide(self, divided: PipedOnStages | StagedPatches) -> None:
        """Run calls in pieces or patches, by the stages of `divided`; those for a comparison, whole in its stages."""
        self.divided, self.stages = divided, divided.stages

    def watch_prompts(self, module: nn.Module, mesh: AxisComm, data: Axis, verifications: Any) -> None:
        """Compare foreign code with a call for all prompts, if `data` divides them and calls are verified at all.

        `mesh`: the ranks that compute the same prompts.
        """
        if data.size == 1 or verifications is None:
            return
        is_alone = self.plan.world_size == self.plan.data
        check = ForeignCheck(module, mesh, verifications, self._is_comparing)
        self.prompts = PromptCheck(module, data, check, is_alone=is_alone)

    def begin(self, *, watched: bool, call: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Begin an image. `watched`: a callback runs between its steps, which may change the denoiser.

        `call`: of the pipeline, for all prompts. Raises PlanError for too few prompts.
        """
        self._watched, self._looked = watched, None
        if self.prompts is not None:
            self.prompts.begin(call)

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the denoiser's forward."""
        if self.plan.world_size > 1 or self.plan.weights != "whole":
            refuse_gradients(module, str(self.plan), (args, kwargs))
        self._count(args, kwargs)
        looks = self._look_again()
        before = kept_by_processors(module) if looks and self._splits_calls else None
        if self.plan.patch > 1 and (looks or is_smoothed(self.pipe)):
            refuse_smoothed(module, str(self.plan))
        original = self.fn_ref.original_forward
        plain = original if self.stages is None else partial(self.stages.denoise, original)
        self._divide_weights(module, plain if self.stages is None else original, (args, kwargs))
        forward = plain if self.divided is None else partial(self.divided.denoise, original)
        for layer in reversed(self.layers):
            forward = partial(layer.denoise, forward)
        stale_before, start = self._stale_calls(), time.perf_counter()
        kept, plain = with_own_lists((args, kwargs)), on_own_lists(plain)
        with refused_in_words(module, str(self.plan), self._way_out(), partial(original, *kept[0], **kept[1])):
            for layer in self.layers:
                if isinstance(layer, GuidanceSplit):
                    if looks:  # iterates over all modules, so not at every call
                        self._by_branch, layer.counts_calls = layer.layers_of(module), counts_calls(module)
                    layer.by_branch = self._by_branch
                    layer.carriers = {} if self.check is None else self.check.carriers_of(plain, kept)
            split = partial(self._checked, partial(forward, *args, **kwargs), plain, kept)
            result = split() if self.prompts is None else self.prompts.run(split, plain, kept)
            if before is not None:
                refuse_what_processors_keep(module, str(self.plan), before)
        age = "stale" if self._stale_calls() > stale_before else "exact"
        self.comm.traffic.note("call", "", f"step {self.clock.evaluation}, call {self.clock.call} ({age})", start)
        # A rank may have to wait as long as another one computes, which is known after the first call only.
        transport, seconds = self.comm.transport, time.perf_counter() - start
        transport.deadline = max(transport.deadline, self.deadline + 2 * seconds)
        return result

    def _checked(self, split: Callable[[], Any], plain: Callable[..., Any], call: tuple[Any, Any]) -> Any:
        if self.check is None:
            return split()
        shared = [layer for layer in self.layers if isinstance(layer, SharedDenoiser)]
        self.check.inner = [layer.foreign for layer in shared]
        remembers = any(layer.history is not None for layer in shared) or cache_of(self.check.denoiser) is not None
        return self.check.run(split, plain, call, remembers=remembers)

    def _is_comparing(self) -> bool:
        """Whether a layer compares a call, which is no part of the pipeline's."""
        shared = [layer.foreign for layer in self.layers if isinstance(layer, SharedDenoiser)]
        checks = shared if self.check is None else [*shared, self.check.foreign]
        return any(each.is_comparing for each in checks)

    def pass_over(self, *args: Any, **kwargs: Any) -> None:
        """Count a call of the denoiser whose output is known already."""
        self.clock.guided = self.guided()
        self.clock.next_call()
        for layer in self.layers:
            if isinstance(layer, GuidanceSplit):
                layer.pass_over(*args, **kwargs)

    def _divide_weights(self, module: nn.Module, plain: Callable[..., Any], call: tuple[Any, Any]) -> None:
        plain = on_own_lists(plain)
        if self.tensor is not None and self.weights is not None:
            self.weights.divide_features(self.tensor, plain, call)
        elif self.tensor is not None:
            self.tensor.prepare(plain, call)
        if self.weights is not None:
            found = self.weights.before_denoiser(module, plain, call)
            if self.stages is not None:
                self.stages.hosted = found

    @property
    def _splits_calls(self) -> bool:
        return self.plan.world_size > self.plan.data

    def _look_again(self) -> bool:
        """Return whether the denoiser may have changed: before the image, or in a callback between the steps.

        A second denoiser may first be called late in an image, or late in each step.
        """
        if self._looked is not None and not (self._watched and self._looked != self.clock.evaluation):
            return False
        self._looked = self.clock.evaluation
        self.votes.renew()
        for layer in (*self.layers, self.stages, self.divided, self.check, self.prompts):
            if hasattr(layer, "unsure"):
                layer.unsure = True
        return True

    def _way_out(self) -> str:
        if self.plan.patch > 1:
            return "Use plan cfg=2 or data=N, which do not split the image"
        if self.plan.tensor > 1:
            return "Use tensor=1, and give the devices to another axis"
        if self.plan.stage > 1:
            return "Use stage=1"
        if self.plan.cfg == 1:
            return "Use data=1, and give the devices to another axis, e.g. patch"
        return f"Use cfg=1, and give the devices to another axis, e.g. patch={self.plan.cfg}"

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        """Called by diffusers, with this spelling, when the hook is removed."""
        self.votes.restore()
        return module

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call. In the first one find how many a step has: branches of guidance may have a call each."""
        self.clock.guided = self.guided()
        if self.clock.next_call() > 0 or self.clock.evaluation > 0 or not any(self._histories()):
            return
        branches = 1 if self.pipe is None else step_branches(self.pipe, self.clock.guided)
        is_one = branches > 1 and count_branches(sample_of(args, kwargs)) > 1
        self.clock.calls = 1 if is_one else branches

    def _histories(self) -> Iterator[StaleState]:
        kinds = SharedDenoiser, StagedPatches
        split = [layer for layer in (*self.layers, self.divided) if isinstance(layer, kinds)]
        return (layer.history for layer in split if layer.history is not None)

    def _stale_calls(self) -> int:
        return sum(history.stale_calls for history in self._histories())
