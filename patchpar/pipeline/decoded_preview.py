"""An image of a call on its way, decoded as the pipeline decodes it.

A pipeline unpacks, scales and cuts latents for its decoder in its own code, at the end of its `__call__`. That code
makes the preview: a copy of the pipeline is called with the same arguments within a step of its scheduler. There each
step returns the estimate of the clean latents, and networks return what they have returned before, so that no denoiser
and no encoder of prompts computes anything again. With the last latents as the estimate, it is the finished image.

call of the pipeline      step 1   step 2   step 3 ............................ step 30   decode
                                              |
call of its copy                            encode an image, if there is one, steps without work, decode
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.pytree import entries
from patchpar.errors import PatchparError, PlanError
from patchpar.models.call_parameters import parameters_of
from patchpar.pipeline.recorded_networks import RecordedNetworks, all_but_vaes
from patchpar.plan.plan import Plan
from patchpar.shard.compiled import is_compiled
from patchpar.shard.generator_states import GeneratorStates
from patchpar.shard.generators import generators_of
from patchpar.shard.hooks import HookSet
from patchpar.strategies.scheduler_step import SchedulerStepOverride, Step, sample_in
from patchpar.strategies.structure.options import StructureGuidance

CALLBACKS = ("callback_on_step_end", "callback_on_step_end_tensor_inputs")
CHANGES_NETWORK = "_set_pag_attn_processor"
WAY_OUT = "use previews of the latents (previews: linear)"
OF_CODE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)


class PreviewDecoder:
    """Makes previews of one call of a pipeline. All ranks that divide the call make each of them together.

    `aside`: entered while one is made, for what decodes on several ranks. `is_callers`: this is the caller's process,
    whose default generators are its own.
    """

    def __init__(
        self,
        pipe: Any,
        plan: Plan,
        device: torch.device,
        *,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
        is_callers: bool = False,
    ) -> None:
        _refuse(pipe, plan)
        self._pipe, self._device, self._aside, self._is_callers = pipe, device, aside, is_callers
        self._networks = RecordedNetworks(pipe)
        self._arguments: dict[str, Any] = {}
        self._begun = GeneratorStates({}, device)

    def watching(self, arguments: Mapping[str, Any]) -> HookSet:
        """Return hooks on the networks during the call, whose arguments these are."""
        known = parameters_of(type(self._pipe))
        plain = {name: value for name, value in {"output_type": "pil", "return_dict": True}.items() if name in known}
        others = {name: value for name, value in arguments.items() if name not in CALLBACKS}
        self._arguments = {**others, **plain}
        self._begun = GeneratorStates(self._arguments, self._device)
        return self._networks.hooks()

    def image(self, scheduler: Any, result: Any, estimate: Tensor) -> Any:
        """Return the first image, of PIL, of clean latents as they are estimated in a step.

        `result`: what that step has returned. `estimate`: [B, ...], of the shape of its latents. Raises PlanError for
        a pipeline that makes none of them, and as a call of the pipeline does.
        """
        name = type(self._pipe).__name__
        try:
            with self._undisturbed():
                output, count = self._ended(scheduler, with_estimate(result, estimate))
        except (PatchparError, torch.OutOfMemoryError):
            raise
        except OF_CODE as error:
            raise PlanError(f"previews by the decoder: {name} cannot be ended early ({error!r}): {WAY_OUT}") from error
        images = getattr(output, "images", None)
        if not count or not isinstance(images, list) or not hasattr(images[0], "convert"):
            raise PlanError(f"previews by the decoder: {name} makes no images of its scheduler's latents: {WAY_OUT}")
        return images[0]

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Leave generators, and what ranks know of decoded images, as they are; meanwhile these are as at the begin."""
        now = GeneratorStates(self._arguments, self._device)
        default = not (self._is_callers and generators_of(self._arguments))
        with self._aside(), torch.no_grad():
            try:
                self._begun.restore(default=default)
                yield
            finally:
                now.restore(default=default)

    def _ended(self, scheduler: Any, result: Any) -> tuple[Any, int]:
        """Return the output of a call in which all steps return `result`, and how many there were."""
        steps = 0

        def step(_: Step, *args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            return result

        own = copy.deepcopy(scheduler)
        vars(own).pop("step", None)
        own.step = SchedulerStepOverride(own, step)
        ending = copy.copy(self._pipe)
        # not by setattr, with which diffusers changes the configuration of the pipeline
        vars(ending).update(self._networks.stand_ins(), scheduler=own, maybe_free_model_hooks=lambda: None)
        vars(ending)["_progress_bar_config"] = {"disable": True}
        return ending(**self._arguments), steps


def with_estimate(result: Any, estimate: Tensor) -> Any:
    """Return the result of a scheduler's step with `estimate`, [B, ...], as its latents, and as their estimate."""
    sample = sample_in(result)
    estimate = estimate.to(sample)

    def replaced(value: Any) -> Any:
        return estimate if isinstance(value, Tensor) and value.shape == sample.shape else value

    if isinstance(result, tuple):
        return tuple(map(replaced, result))
    return type(result)(**{name: replaced(value) for name, value in entries(result).items()})


def _refuse(pipe: Any, plan: Plan) -> None:
    """Raise PlanError for calls that cannot be ended in their midst."""
    name, reason = type(pipe).__name__, ""
    if isinstance(plan.strategy, StructureGuidance):
        reason = f"strategy {plan.strategy.name} has latents of its own on each rank"
    elif not hasattr(getattr(pipe, "scheduler", None), "step"):
        reason = f"{name} has no scheduler that makes steps"
    elif hasattr(pipe, CHANGES_NETWORK):
        reason = f"{name} changes its denoiser at the begin and the end of a call"
    else:
        compiled = [each for each, network in all_but_vaes(pipe).items() if is_compiled(network)]
        reason = f"{', '.join(compiled)} of {name} is compiled as a whole" if compiled else ""
    if reason:
        raise PlanError(f"previews by the decoder: {reason}: {WAY_OUT}")
