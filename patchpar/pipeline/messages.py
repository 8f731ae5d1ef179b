"""What travels between a caller and the ranks for one pipeline call. No torch, so that a caller need not import it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchpar.pipeline.rank_stats import RankStats
from patchpar.plan.plan import Plan

ANY_RANK = {"per rank": True}  # of a field that may be another on each rank under torchrun, see launch.arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """Where the caller's default random numbers stand: what a call without a generator draws from.

    `cpu` and `cuda` are states of torch's generators, `cuda` where the caller has used CUDA. A caller that has not
    imported torch cannot have seeded it; then `seed` is a fresh one for all ranks.
    """

    cpu: Any = None
    cuda: Any = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a call needs beside the pipeline's own arguments.

    `plan` and `verify`: how the call is shared between the ranks, and whether a split denoiser is checked first, with
    the folder of verdicts if not the user's own. `vae`: how its VAE runs, see `shard.vae.modes`. `random`: None leaves
    the ranks' own. `has_callback`: the caller has a callback_on_step_end. `same_everywhere`: take rank 0's random
    state, since under torchrun each process has its own, and end together. `quiet`: no progress bar on the ranks, the
    caller shows one. `tracing`: keep every event.
    """

    plan: Plan
    verify: bool | Path = True
    vae: str = "auto"
    random: RandomState | None = None
    has_callback: bool = False
    same_everywhere: bool = False
    quiet: bool = field(default=False, metadata=ANY_RANK)
    tracing: bool = field(default=False, metadata=ANY_RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What one rank reports of one call: its output where it is the one to give it, and figures.

    `figures` are its own, or under torchrun those of every rank that took part, in order.
    `generators` and `random` are the states after the call of the generators that were passed, and of torch: the
    caller's must move on as if the call had been made there.
    """

    output: Any
    generators: tuple[Any, ...]
    random: RandomState | None = None
    figures: tuple[RankStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The end of a step, as the caller's callback_on_step_end sees it. `facts`: plain attributes of the pipeline."""

    step: int
    timestep: Any
    tensors: dict[str, Any]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallbackChange:
    """What a callback does to the pipeline: calls the method `path` with `args` and `kwargs`, or sets an attribute.

    `path` may lead through a network, as in "unet.set_attn_processor". Without `kwargs` the attribute of that path
    becomes the one of `args`.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None = None

    @property
    def is_of_networks(self) -> bool:
        """Whether it may change networks, which a plain attribute of the pipeline does not."""
        return self.kwargs is not None or "." in self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackResult:
    """What a callback changed: tensors by name, and what it did to the pipeline, in order."""

    tensors: dict[str, Any]
    changes: tuple[CallbackChange, ...]


@dataclass(frozen=True, slots=True)
class MethodResult:
    """What a method of the pipeline or of a network of it returned; `itself` if that was whose method it is."""

    value: Any = None
    itself: bool = False


@dataclass(frozen=True, slots=True)
class FinalState:
    """Ends a call under torchrun: what ranks other than 0 return, and where all generators stand then."""

    output: Any
    generators: list[Any]
    random: RandomState
