"""Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598) with its branches on the ranks of axis `cfg`.

What is split: the calls of the denoiser, one branch with the prompt and one without.

    branches in one call      rank 0:  x[:n] -> e0 --+--> cat(e0, e1)      each rank runs its part of the batch
                              rank 1:  x[n:] -> e1 --+--> cat(e0, e1)

    one call per branch       rank 0:  call 0 ==> e0     call 1 --> async  each rank runs its own calls and returns
                              rank 1:  call 0 --> async  call 1 ==> e1     async tensors for the others

The sample shows which of the two it is: one call for all branches repeats the latents. Call c of a step runs on rank
c mod size; the number of calls is not assumed, so guidance that is off in some steps (the first ones too, if the
pipeline says that it guides) or a second denoiser changes the speed only. The first call of each form runs on every
rank, to learn the specs of the output, and so does each call that modifies a cache among its arguments.
"""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from patchpar.comm.async_tensor import AsyncMessage
from patchpar.comm.banded_tensor import whole_of
from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import tensors_in, with_tensors
from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.call_parameters import parameters_of
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.argument_changes import are_as_before, gives_back, held_by, with_given, without_given
from patchpar.shard.batch import Batch, count_branches, filled_up, largest_of, sample_of
from patchpar.shard.guidance_branches import at_own_index
from patchpar.shard.step_caches import refuse_counting
from patchpar.shard.verification import call_signature
from patchpar.shard.weights.rounds import GatherRounds
from patchpar.strategies.cfg.exchange import OutputForm, PredictionExchange, PredictionTime

Shapes = Sequence[Sequence[tuple[int, ...]]]
log = logging.getLogger(__name__)
WITHOUT = "run it with cfg=1 and give the devices to another axis, e.g. patch"


def guidance_of(pipe: Any, arguments: Mapping[str, Any]) -> bool | None:
    """Return whether a call of a diffusers pipeline with these arguments applies guidance; None if that is unknown.

    Call it when the denoiser is first called: before that, the pipeline may not have decided.
    """
    if getattr(pipe, "do_perturbed_attention_guidance", False):
        return True
    given = {**parameters_of(type(pipe)), **arguments}
    with suppress(AttributeError):  # it has no such property, or has not been called yet
        return bool(pipe.do_classifier_free_guidance)
    if given.get("true_cfg_scale") is not None:
        negative = any(given.get(name) is not None for name in ("negative_prompt", "negative_prompt_embeds"))
        return bool(given["true_cfg_scale"] > 1 and negative)
    scale = given.get("guidance_scale")
    return False if isinstance(scale, (int, float)) and scale <= 1 else None


def refuse_perturbed(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for perturbed attention guidance (arXiv:2403.17377).

    Its attention layers split the batch into branches, and a call for a patch does not always have all of them.
    """
    if getattr(pipe, "do_perturbed_attention_guidance", False):
        raise UnsupportedModel(
            f"{type(pipe).__name__} with pag_scale={arguments.get('pag_scale', 'its default')} splits the batch into "
            "guidance branches in its attention, but a call for a patch of a large image may have only some of them: "
            "use strategy exact, or pag_scale=0"
        )


@dataclass(slots=True)
class GuidanceProgress:
    """What is known of one pipeline call so far."""

    step: int = -1
    calls: int = 0  # in this step
    finished: int = 0  # steps
    most_calls: int = 0  # in any finished step
    branches: dict[tuple[TensorSpec, ...], int] = field(default_factory=dict)  # by the specs of the sample

    def turn_to(self, step: int) -> None:
        """Begin a new step."""
        if self.calls:
            self.finished, self.most_calls = self.finished + 1, max(self.most_calls, self.calls)
        self.step, self.calls = step, 0

    @property
    def most(self) -> int:
        """The most guidance branches of any step so far; 1 is no guidance."""
        return max(self.most_calls, self.calls, *self.branches.values())


class GuidanceSplit:
    """Distributes guidance branches over `axis`, of several ranks. Every call of every denoiser goes through `denoise`.

    Call `reset` before every pipeline call and `finish` after it. `carriers`: what is known of the arguments of the
    next call, see `Batch.known`; `by_branch`: what `layers_of` returns of its network; `counts_calls`: its cache.
    """

    def __init__(
        self,
        comm: Communicator,
        axis: Axis,
        clock: StepClock,
        layers_of: Callable[[nn.Module], Sequence[nn.Module]] = lambda network: (),
    ) -> None:
        self.layers_of = layers_of
        self.carriers: Mapping[str, int | None] = {}
        self.by_branch: Sequence[nn.Module] = ()
        self.counts_calls: str | None = None
        self._axis, self._clock = axis, clock
        self._post = PredictionExchange(comm, axis, self._send_shards, self._not_made)
        self.rounds: GatherRounds | None = None
        """Of networks whose weights are sharded over this axis too."""
        self._progress = GuidanceProgress()
        self.forms: dict[Any, OutputForm | None] = {}
        """What calls for one branch return, by their form, kept from one pipeline call to the next."""
        self._shapes: dict[Any, Shapes] = {}

    def reset(self) -> None:
        """Begin a pipeline call."""
        if self.rounds is not None:
            self.rounds.reset()
        self._post.begin()
        self._progress = GuidanceProgress()

    def finish(self) -> None:
        """End a pipeline call: wait for all messages. Raises ExchangeError if the ranks are out of step."""
        self._post.settle()
        self._post.audit()
        most, size = self._progress.most, self._axis.size
        if not self._axis.rank and 0 < most < size:
            log.warning("a step had at most %d guidance branches: cfg=%d was no faster than cfg=%d", most, size, most)

    def forget(self) -> None:
        """Discard what is known of the denoisers, which may change now: the first call runs on every rank again."""
        self.forms.clear()
        self._shapes.clear()

    def catch_up(self) -> None:
        """Send the shards that calls of other ranks wait for, and receive their predictions. Raises ExchangeError."""
        if self.rounds is not None:
            self._post.wait()

    def _send_shards(self) -> None:
        while self.rounds is not None and self.rounds.outstanding:
            self._post.receive_made()  # of the round before
            self.rounds.catch_up()

    def _not_made(self) -> Container[int]:
        return () if self.rounds is None else self.rounds.outstanding

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `forward(*args, **kwargs)`, computed by the ranks of the axis together.

        Raises PlanError if there is no guidance to split, ExchangeError if another rank is late or out of step.
        """
        progress, sample = self._progress, sample_of(args, kwargs)
        self._count(sample)
        if self._clock.branches > 1:
            self.catch_up()
            return self._part_of_batch(forward, sample, args, kwargs)
        if progress.most == 1 and (progress.finished if self._clock.guided is None else not self._clock.guided):
            raise PlanError(self._no_guidance())
        refuse_counting(self.counts_calls, self._axis.size)  # on all ranks, before any sends
        return self._own_call_or_async_tensor(forward, sample, args, kwargs)

    def pass_over(self, *args: Any, **kwargs: Any) -> None:
        """Count a call whose output is known already, on every rank."""
        self._count(sample_of(args, kwargs))

    def _count(self, sample: Any) -> None:
        if self._clock.evaluation != self._progress.step:
            self._post.settle()
            self._progress.turn_to(self._clock.evaluation)
        self._progress.calls += 1
        self._clock.branches = self._branches(sample)

    def condition(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return `forward(*args, **kwargs)` for a network whose output the denoiser takes, such as a ControlNet.

        Each rank computes its part of the batch. The outputs are async tensors of the whole: `denoise` uses our part of
        them and nothing is sent; any other use fetches the rest, on all ranks.
        """
        axis, when = self._axis, self._now
        self.catch_up()
        sample = sample_of(args, kwargs)
        batch = Batch.of(sample, self.carriers)
        if self._branches(sample) == 1 or batch.size % axis.size or "" in self.carriers:
            return forward(*args, **kwargs)
        own_args, own_kwargs = batch.part((args, kwargs), axis.rank, axis.size)
        output = forward(*own_args, **own_kwargs)
        own = [x if x.is_contiguous() else x.contiguous() for x in tensors_in(output)]  # not of bands: these stay so
        shapes = self._part_shapes(own, (args, kwargs), when) if batch.by_item else [(x.shape,) for x in own]
        largest = [largest_of(each) for each in shapes]
        specs = [((axis.size * shape[0], *shape[1:]), x.dtype) for x, shape in zip(own, largest, strict=True)]

        def fetch() -> list[Tensor]:
            parts = zip(map(whole_of, own), largest, strict=True)
            filled = with_tensors(output, [filled_up(x, shape) for x, shape in parts])
            return tensors_in(batch.join(self._post.exchange(filled, when)))

        differ = shapes if batch.by_item else ()
        return with_tensors(output, AsyncMessage(specs, own[0].device, fetch, own, differ).tensors)

    def _part_shapes(self, own: Sequence[Tensor], call: Any, when: PredictionTime) -> Shapes:
        """Return for each of our tensors its shape on every rank, exchanged once for each form of the whole call."""
        form = tuple(TensorSpec.of(x) for x in tensors_in(call))
        if form not in self._shapes:
            self._shapes[form] = self._post.shapes_of_all(own, when)
        return self._shapes[form]

    def _branches(self, sample: Any) -> int:
        specs, known = tuple(TensorSpec.of(x) for x in tensors_in(sample)), self._progress.branches
        if specs not in known:
            known[specs] = count_branches(sample)
        return known[specs]

    def _part_of_batch(
        self, forward: Callable[..., Any], sample: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        axis, batch = self._axis, Batch.of(sample, self.carriers)
        if "" in self.carriers:
            return forward(*args, **kwargs)
        if batch.size % axis.size:
            branches = self._branches(sample)
            raise PlanError(
                f"guidance here has {branches} branches in one batch of {batch.size}, which cfg={axis.size} ranks "
                f"cannot split evenly: use cfg={branches}, or {WITHOUT}"
            )
        own_args, own_kwargs = own_call = batch.part((args, kwargs), axis.rank, axis.size)
        with at_own_index(self.by_branch, axis.rank, axis.size):
            output = forward(*own_args, **own_kwargs)
        if batch.by_item or not gives_back(output, own_call):
            return batch.join(self._post.exchange(output, self._now))
        joined = batch.join(self._post.exchange(without_given(output, own_call), self._now))
        return with_given(joined, output, own_call, (args, kwargs))

    def _own_call_or_async_tensor(
        self, forward: Callable[..., Any], sample: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        when, axis = self._now, self._axis
        key = (when.call, *self._form_of_call(sample, args, kwargs))
        form = self.forms.get(key)
        owner = when.call % axis.size
        if form is None:
            self.catch_up()
            before = held_by(kwargs)
            output = forward(*args, **kwargs)
            if are_as_before(before, held_by(kwargs)):  # else every rank needs the modified cache
                self.forms[key] = OutputForm.of(output)
            return output
        if owner != axis.rank:
            is_made = self.rounds is None or self.rounds.skip_call()
            at_once = is_made and when.call > axis.rank
            number = 0 if self.rounds is None else self.rounds.count
            return with_tensors(form.tree, self._post.expect(owner, form, when, at_once=at_once, number=number))
        output = self._own_call(forward, args, kwargs)
        found = OutputForm.of(output)
        if found is None or found.specs != form.specs:
            raise UnsupportedModel(
                f"{when}: the denoiser returned {found and found.specs}, but {form.specs} for the same sample "
                f"before, so that other ranks cannot know the shapes to receive: {WITHOUT}"
            )
        self._post.send(output, form, when)
        return output

    def _form_of_call(self, sample: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if self.rounds is not None:  # what is verified again at the first call of its form runs blocks more than once
            return (str(call_signature((args, kwargs))),)  # a text: before torch 2.8 what it has of a tree has no hash
        flags = tuple((name, value if isinstance(value, (str, bool)) else None) for name, value in kwargs.items())
        return len(args), flags, tuple(TensorSpec.of(x) for x in tensors_in(sample))

    def _own_call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.rounds is not None and not self.rounds.can_join:
            self.catch_up()
        with nullcontext() if self.rounds is None else self.rounds.own_call():
            return forward(*args, **kwargs)

    @property
    def _now(self) -> PredictionTime:
        return PredictionTime(self._clock.evaluation, self._clock.call)

    def _no_guidance(self) -> str:
        return (
            f"the plan has cfg={self._axis.size}, but this call uses no classifier-free guidance (a guidance_scale or "
            "true_cfg_scale of 1 or less, no negative prompt where one is needed, or a distilled model), so that there "
            f"is one branch only: set guidance_scale above 1, or {WITHOUT}"
        )
