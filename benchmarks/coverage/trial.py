"""One denoiser on ranks that are threads, in one mode after the other, against its plain forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel, VerificationError
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.transformer.denoiser import TokenDenoiser
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies import parse_strategy
from tests.tiny.transformers_entry import noise
from tests.tokens.ranks import predictions
from tests.unit.threads import on_threads

from .modes import FIRST, MOVED, SECOND, Mode
from .subjects import Subject

LIMIT = 1e-5
SEEN = 100 * LIMIT
"""What a control must be off by at least."""
DEADLINE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One mode on a number of ranks: the worst of its exact evaluations, the best of those that may not be.

    `refusal` and `failure` say why there are none, or what is wrong with them.
    """

    mode: Mode
    ranks: int
    worst: float | None = None
    best: float | None = None
    refusal: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the first use of a denoiser gives: where its tokens or seams are, or why it is not split."""

    known: Any = None
    refusal: str = ""
    failure: str = ""

    @property
    def whole(self) -> dict[str, str]:
        """Blocks that every rank has all of, and why."""
        return dict(self.known.whole) if isinstance(self.known, TokenPlan) else {}

    @property
    def by_tokens(self) -> bool:
        """Whether tokens are split; else it is in bands."""
        return isinstance(self.known, TokenPlan)


class Trial:
    """A denoiser, once for every rank, and what it predicts plainly."""

    def __init__(self, subject: Subject, most_ranks: int) -> None:
        self.subject = subject
        self.models = [subject.build() for _ in range(most_ranks)]
        self.by_mode: set[str] = set()  # attention calls whose keys go the way of the mode
        self.gathered: set[str] = set()  # those whose keys come all at once in every mode
        wanted = [{name: self._plain(model, name) for name in (FIRST, SECOND, MOVED)} for model in self.models]
        self._want = wanted[0]  # all have run alike, since what they keep of a run is compared between ranks

    def inputs(self, name: str) -> dict[str, Any]:
        """Fresh arguments of an evaluation."""
        call = self.subject.call(1 if name == SECOND else 0)
        latent = self.subject.latent
        return call | {latent: tree_map_only(Tensor, _other, call[latent])} if name == MOVED else call

    def _plain(self, model: nn.Module, name: str) -> list[Tensor]:
        with torch.no_grad():
            return [x.clone() for x in predictions(model(**self.inputs(name)))]

    def first_use(self) -> Found:
        """As a user does it: two ranks, exact, nothing known, verified."""
        with TemporaryDirectory() as folder:
            mode = Mode(name="first use", strategy="exact", evaluations=(FIRST, SECOND))
            found = self._on_ranks(2, lambda comm: self._use(mode, comm, 2, verifications=Path(folder)))
        errors = [each for each in found if isinstance(each, Exception)]
        if not errors:
            return Found(known=found[0][1])
        if len(errors) == len(found) and isinstance(errors[0], (UnsupportedModel, VerificationError)):
            return Found(refusal=str(errors[0]))
        return Found(failure=_reported(errors[0]))

    def run(self, mode: Mode, ranks: int, known: Any) -> Result:
        """One mode; `known` is what the first use has found."""
        found = self._on_ranks(ranks, lambda comm: self._use(mode, comm, ranks, known=known))
        errors = [each for each in found if isinstance(each, Exception)]
        if errors:
            refused = len(errors) == ranks and all(isinstance(each, UnsupportedModel) for each in errors)
            reported = {"refusal": str(errors[0])} if refused else {"failure": _reported(errors[0])}
            return Result(mode=mode, ranks=ranks, **reported)
        distances = [
            max(distance(rank[0][number], self._want[name]) for rank in found)
            for number, name in enumerate(mode.evaluations)
        ]
        return _judged(mode, ranks, distances)

    def is_restored(self) -> bool:
        """Whether every model predicts bit by bit what the first did at the start, and carries no hook."""
        for model in self.models:
            if any(hasattr(module, "_diffusers_hook") for module in model.modules()):
                return False
            got, want = self._plain(model, FIRST), self._want[FIRST]
            if not all(torch.equal(x, y) for x, y in zip(got, want, strict=True)):
                return False
        return True

    def _on_ranks(self, ranks: int, use: Callable[[Communicator], Any]) -> list[Any]:
        return on_threads(ranks, lambda transport: use(Communicator(transport)), deadline=DEADLINE)

    def _use(
        self, mode: Mode, comm: Communicator, ranks: int, *, known: Any = None, verifications: Path | None = None
    ) -> Any:
        """Predictions of one image on this rank, and what is known of the denoiser then."""
        rank, clock = comm.transport.rank, StepClock()
        model = self.models[rank]
        layer: Any = parse_strategy(mode.strategy).install(
            model,
            comm,
            Axis("patch", rank, ranks, tuple(range(ranks))),
            clock=clock,
            verifications=None if verifications is None else VerificationCache(verifications / str(rank)),
        )
        known_as = "plan" if isinstance(layer, TokenDenoiser) else "sites"
        setattr(layer, known_as, known)
        layer.exchange = mode.exchange
        comm.traffic.events = []
        try:
            found = [self._evaluation(layer, clock, name) for name in mode.evaluations]
            layer.finish()
        finally:
            layer.restore()
        if mode.name == "ring":
            self._look_at(comm)
        return found, getattr(layer, known_as)

    def _look_at(self, comm: Communicator) -> None:
        """Tell attention calls whose keys went round from those whose keys came at once."""
        events = comm.traffic.events or []
        self.by_mode |= {event.where for event in events if event.kind == "kv"}
        at_once = {event.where for event in events if event.kind == "tokens" and " attention " in event.where}
        self.gathered |= at_once - self.by_mode

    def _evaluation(self, layer: Any, clock: StepClock, name: str) -> list[Tensor]:
        clock.next_call()
        with torch.no_grad():
            found = [x.clone() for x in predictions(layer.denoise(layer.denoiser.forward, **self.inputs(name)))]
        clock.tick()
        return found


def _judged(mode: Mode, ranks: int, distances: Sequence[float]) -> Result:
    exact = [distances[number] for number in mode.exact]
    if mode.exchange == "off":
        best, least, what = min(distances), SEEN, "without exchange it is right all the same"
    else:
        best = min((distances[number] for number in mode.stale), default=None)
        least, what = LIMIT, "old keys are not what it uses"
    wrong = [f"off by {each:.1e}" for each in exact if not each <= LIMIT]
    if best is not None and not best > least:
        wrong.append(f"{what}: {best:.1e}")
    worst = max(exact, default=None)
    return Result(mode=mode, ranks=ranks, worst=worst, best=best, failure="; ".join(wrong))


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest norm of a difference over the norm of what is wanted; infinite where anything is not finite."""
    if [x.shape for x in got] != [y.shape for y in want]:
        return math.inf
    found = [
        ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-12)).item()
        for x, y in zip(got, want, strict=True)
    ]
    return max(each if math.isfinite(each) else math.inf for each in found)


def _other(x: Tensor) -> Tensor:
    return x + 0.5 * noise(*x.shape, seed=11) if x.is_floating_point() else x.flip(-1)


def _reported(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
