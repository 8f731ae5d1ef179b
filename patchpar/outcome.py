"""The caller's side of one call: what is sent, what is heard while it runs, and what its results become."""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from patchpar.call import DrawOptions, generators_of

IN_WORKER_CALLBACKS = ("PipelineCallback", "MultiPipelineCallbacks")


class Caller:
    """One call as its caller sees it: takes the callback out, shows progress, answers the ranks."""

    def __init__(
        self,
        owner: Any,
        kwargs: Mapping[str, Any],
        *,
        kind: str,
        progress: Mapping[str, Any],
        on_step: Callable[[int, int], object] | None,
    ) -> None:
        self.kwargs = dict(kwargs)
        self._owner, self._kind, self._progress, self._on_step = owner, kind, dict(progress), on_step
        self._bar: Any = None
        self._output_module = owner._state.model.module
        self._callback = self._take_callback()
        self.options = DrawOptions(
            random_state=_random_state() if kind == "local" else None,
            has_callback=self._callback is not None,
            same_everywhere=kind == "torchrun",
            quiet=kind == "local" or on_step is not None,
        )

    def _take_callback(self) -> Callable[..., Any] | None:
        callback = self.kwargs.get("callback_on_step_end")
        if callback is None or self._kind == "inline":
            return None
        if any(base.__name__ in IN_WORKER_CALLBACKS for base in type(callback).__mro__):
            return None  # diffusers' own callbacks are data: every rank runs them itself
        del self.kwargs["callback_on_step_end"]
        return callback

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Show a progress bar while the ranks work, as diffusers would."""
        self._owner._interrupt = False
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.close()

    def on_event(self, rank: int, event: tuple[str, int, int]) -> None:
        """A step is done."""
        _, step, total = event
        if self._on_step is not None:
            self._on_step(step, total)
        elif self._kind == "local":
            if self._bar is None:
                from tqdm.auto import tqdm  # type: ignore[import-untyped]

                self._bar = tqdm(**{"total": total, **self._progress})
            self._bar.update(1)
        if step == 1 and self._kind == "local":
            self._prepare_for_output()

    def _prepare_for_output(self) -> None:
        """Import what the output's class needs while the ranks work, rather than when it has come."""
        threading.Thread(target=importlib.import_module, args=(self._output_module,), daemon=True).start()

    def on_ask(self, question: tuple[Any, ...]) -> Any:
        """The ranks want rank 0's random state, or the callback's answer: changed tensors and whether to stop."""
        if question[0] == "same":
            return question[1]
        _, step, timestep, tensors = question
        assert self._callback is not None
        versions = {name: getattr(value, "_version", 0) for name, value in tensors.items()}
        before = dict(tensors)
        answer = self._callback(self._owner, step, timestep, tensors) or {}
        changed = {
            name: value
            for name, value in answer.items()
            if value is not before.get(name) or getattr(value, "_version", 0) != versions.get(name)
        }
        return changed, self._owner._state.interrupt

    def merge(self, outputs: Sequence[Any]) -> Any:
        """One output from those of the data ranks."""
        if len(outputs) == 1:
            return outputs[0]
        from patchpar.strategies.data import merge_outputs

        return merge_outputs(outputs)


def _random_state() -> Any:
    """This process's CPU random state, so that torch.manual_seed here means what it means in plain diffusers.

    Without torch in this process nobody can have seeded it; then the ranks agree on a fresh seed.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        import random

        return random.SystemRandom().getrandbits(63)
    return torch.get_rng_state()


def restore_generators(kind: str, kwargs: Mapping[str, Any], drawn: Sequence[Any]) -> None:
    """Move the caller's generators on, as if the call had been made in this process."""
    if kind != "local":
        return
    states = [state for result in drawn if result.output is not None for state in result.generators]
    generators = generators_of(kwargs)
    for generator, state in zip(generators, states[: len(generators)], strict=False):
        generator.set_state(state)
    if drawn[0].random_state is not None and not generators:
        sys.modules["torch"].set_rng_state(drawn[0].random_state)
