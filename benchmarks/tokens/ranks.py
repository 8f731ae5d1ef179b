"""What runs on the ranks of `benchmarks.tokens`: denoiser calls, plain and split in turn, for a given time.

Rank 0 makes the plain call while rank 1 sleeps; then both make each split call. A split call is over when the slower
rank has the prediction, so the times of both are kept.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.timed_rank import TimedRank, relative_error
from benchmarks.tokens.beside import lent_kernel, ring_error, split_by_diffusers
from benchmarks.tokens.model import Subject, subject
from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies import parse_strategy
from tests.ranks import form_group

Step = Callable[[dict[str, Any]], Any]
Figures = dict[str, Any]
THEIRS = "diffusers"
WHOLE_TEXT = ", text on every rank"
FEWEST = 3  # rounds, however long they take
FEW_LATENTS = 16  # a side of the image whose tokens cost next to nothing


class Bench(TimedRank):
    """The engine of one rank."""

    def form_group(self, path: str) -> None:
        """Torch's default group, which diffusers' ways need and our workers have not. `path`: a new file."""
        form_group(self.context, path)

    @torch.no_grad()
    def measure(self, model: str, cases: tuple[str, ...], seconds: float, toy: bool) -> Figures:
        """By case: times of plain and split calls, difference, bytes sent per call, or why it cannot be done."""
        whole = subject(model, toy=toy)
        found: dict[str, Figures] = {}
        steps: dict[str, Step] = {}
        for case in cases:
            found[case] = {"single": [], "pair": [], "waited": []}
            try:
                steps[case] = self._split(whole, case)
                for number in range(1 if case.startswith("exact") else 2):  # exact at first; then buffers settle
                    steps[case](whole.at(number))
            except (ValueError, RuntimeError, NotImplementedError) as error:
                if not case.startswith(THEIRS):
                    raise
                found[case]["refused"] = " ".join(f"{type(error).__name__}: {error}".split())
                steps.pop(case, None)
        for number in self._rounds(seconds):
            self._one_round(whole, steps, found, number)
        facts = {"parameters": whole.parameters, "tokens": whole.tokens, "cases": found}
        return facts | {"ring": self._ring_error(whole)} if any(case.startswith(THEIRS) for case in cases) else facts

    def _one_round(self, whole: Subject, steps: dict[str, Step], found: dict[str, Figures], number: int) -> None:
        call = whole.at(number)
        single, want = self.timed((lambda: whole.model(**call)) if self.context.rank == 0 else None)
        for case, step in steps.items():
            self.comm.traffic.clear()
            pair, got = self.timed(partial(step, call))
            figures = found[case]
            figures["single"].append(single)
            figures["pair"].append(pair)
            figures["waited"].append(self.waited)
            figures["bytes"] = self.sent
            figures["error"] = max(figures.get("error", 0.0), relative_error(got, want))

    def _rounds(self, seconds: float) -> Iterator[int]:
        """Numbers of steps, round by round, while another round fits in, by the clock of rank 0."""
        start, done = time.perf_counter(), 0
        while True:
            spent = time.perf_counter() - start
            last = done >= FEWEST and spent + spent / done > seconds
            if self.together(torch.tensor([float(last)]))[0].item():
                return
            done += 1
            yield 1 + done

    def _split(self, whole: Subject, case: str) -> Step:
        """A call of the model split as the case says."""
        if case.endswith(WHOLE_TEXT):
            return self._split(whole.with_text_on_every_rank(), case.removesuffix(WHOLE_TEXT))
        if not case.startswith(THEIRS):
            text = case if case.startswith("exact") else f"{case}:warmup_steps=1"
            return installed(whole, text, self.comm, self.axis)
        if case.endswith("ulysses"):
            return split_by_diffusers(whole.twin(), ulysses=2)
        step = split_by_diffusers(whole.twin(), ring=2)

        def ring(call: dict[str, Any]) -> Any:
            with lent_kernel():
                return step(call)

        return ring

    def _ring_error(self, whole: Subject) -> str:
        return ring_error(split_by_diffusers(whole.twin(), ring=2), whole.call)

    @torch.no_grad()
    def overhead(self, model: str, seconds: float, toy: bool) -> Figures | None:
        """Plain calls and calls with hooks on one rank, in turn: as they are, and with few tokens. On rank 0 only."""
        if self.context.rank:
            return None
        many = subject(model, toy=toy)
        few = many.of_size(FEW_LATENTS)
        return {
            "many": self._hooked(many, seconds),
            "few": self._hooked(few, seconds / 10),
            "tokens": (many.tokens, few.tokens),
            "blocks": sum(len(block.paths) for block in many.plan.blocks),
        }

    def _hooked(self, whole: Subject, seconds: float) -> Figures:
        steps = {
            "plain": lambda call: whole.model(**call),
            "hooked": installed(whole, "exact", self.comm, Axis("patch", 0, 1, (0,))),
        }
        found: Figures = {"plain": [], "hooked": [], "same": True}
        for step in steps.values():
            step(whole.at(1))
        end, number = time.perf_counter() + seconds, 0
        while number < 2 * FEWEST or time.perf_counter() < end:
            call, outputs = whole.at(number), []
            for name in list(steps)[:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                outputs.append(steps[name](call)[0])
                found[name].append(time.perf_counter() - start)
            self.context.beat(f"call {number}")  # nothing travels here: we are alive nevertheless
            found["same"] &= torch.equal(*outputs)
            number += 1
        return found


def installed(whole: Subject, strategy: str, comm: Communicator, axis: Axis) -> Step:
    """A call of the model with its tokens split by one of our strategies, between the places of `axis`."""
    clock, model = StepClock(guided=False), whole.twin()
    layer = parse_strategy(strategy).install(model, comm, axis, clock=clock)
    layer.plan = whole.plan
    forward = model.forward

    def step(call: dict[str, Any]) -> Any:
        clock.next_call()
        output = layer.denoise(forward, **call)
        clock.tick()
        return output

    return step
