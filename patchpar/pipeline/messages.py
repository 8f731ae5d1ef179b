"""Messages between caller and ranks for one pipeline call. Does not import torch, so that a caller need not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchpar.pipeline.rank_stats import RankStats
from patchpar.plan.plan import Plan
from patchpar.shard.torch_switches import TorchModes

ANY_RANK = {"per rank": True}  # of a field that may differ between ranks of torchrun, see launch.argument_mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The state of the caller's default generators, which a call without a generator samples from.

    `cpu` and `gpu` are states of torch's generators, uint8 tensors [N]; `gpu` only if the caller has used a GPU. A
    caller that has not imported torch cannot have seeded it; then `seed` is a random seed for all ranks.
    """

    cpu: Any = None
    gpu: Any = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """A tensor without torch. `dtype`: torch's name of it, such as "bfloat16". `stride` in elements.

    `data`: the elements in the order of memory, without gaps.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrediction:
    """What a denoiser returned in call `number` of the pipeline, from 0, to the ranks of prompt group `group`.

    `checksum`: 64 bits, of the sample that it was called with. `form`: the tree of the output, for JSON, in which
    `tensors` are numbered.
    """

    number: int
    group: int
    checksum: int
    form: Any
    tensors: tuple[TensorBytes, ...]


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """What a denoiser call took on the rank that sends it, in seconds, without its waits for other ranks."""

    own: float


@dataclass(frozen=True, slots=True)
class RecordingStopped:
    """From here on, nothing is recorded of this call. `loses`: what has been recorded cannot be used either."""

    reason: str
    loses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """Settings of a call beside the pipeline's arguments.

    `plan`: how the ranks divide the call. `ranks`: those that do, in the order of its mesh; None for the first ones.
    Others that take part in the call stay idle. `installation`: a number that ranks have in common until one of them
    makes a call with others; ranks that have another one install the plan anew, as all have to do so together.
    `verify`: whether a split denoiser is verified first; a path is the folder of the verification results.
    `trusted_code`: see `VerificationCache`. `vae`: how its VAE runs, see `shard.vae.modes`. `graphs`: see
    `pipeline.graph_option`. `symmetric_memory`: small exchanges go through memory that GPUs share, where there is such.
    `random`: None keeps the ranks' own random states. `has_callback`: the caller has a callback_on_step_end.
    `same_everywhere`: all ranks take rank 0's random state and final state, since under torchrun each process has its
    own. `quiet`: no progress bar on the ranks, as where the caller shows one. `progress_bar`: the options of the bar
    that a rank shows; None for the pipeline's own. `tracing`: record every event. `previews`: the caller gets the
    latents of so many steps between the first and the last, and those of the last; or, with `decoded_previews`, the
    decoded images of so many, which all ranks of the call make together. `records`: one rank of each prompt group sends
    a RecordedPrediction after each call of a denoiser. `recorded`: those of an earlier call with the same arguments;
    the pipeline gets these predictions, and the first denoiser call that is made is the one behind them. `adapters`:
    names and scales of those that act in this call; None for the pipeline's selection. `modes`: what the
    caller has set of torch. `noise_of_first`: the first of the ranks samples for all, see `shard.shared_noise`.
    """

    plan: Plan
    ranks: tuple[int, ...] | None = None
    installation: int = 0
    verify: bool | Path = True
    trusted_code: tuple[str, ...] = ()
    vae: str = "auto"
    graphs: bool | str | None = None
    symmetric_memory: bool = False
    random: RandomState | None = None
    has_callback: bool = False
    same_everywhere: bool = False
    records: bool = False
    recorded: tuple[RecordedPrediction, ...] = ()
    adapters: tuple[tuple[str, float], ...] | None = None
    decoded_previews: int = 0
    modes: TorchModes = field(default_factory=TorchModes)
    noise_of_first: bool = False
    quiet: bool = field(default=False, metadata=ANY_RANK)
    progress_bar: Mapping[str, Any] | None = field(default=None, metadata=ANY_RANK)
    tracing: bool = field(default=False, metadata=ANY_RANK)
    previews: int = field(default=0, metadata=ANY_RANK)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that divide the call, in the order of the mesh."""
        return tuple(range(self.plan.world_size)) if self.ranks is None else self.ranks

    @property
    def previewed(self) -> bool:
        """Whether the caller gets latents before the end, as all ranks know: under torchrun only some may be asked."""
        return self.previews > 0 and not self.same_everywhere

    @property
    def to_install(self) -> dict[str, Any]:
        """What the ranks install before the call, unless they have."""
        names = ("plan", "verify", "trusted_code", "vae", "graphs", "symmetric_memory", "modes")
        return {name: getattr(self, name) for name in names} | {"ranks": self.members}

    @property
    def is_forecast(self) -> bool:
        """Whether forecasts are of such a call: its ranks make all of it, in the dtype of its networks."""
        return not (self.recorded or self.decoded_previews or self.modes.autocast)


EVERY_STEP = 2**31
"""More steps than any call has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Previews:
    """A caller that wants latents before the end: of `count` steps between the first and the last, and of the last.

    With `decoded`, `receive` gets a PIL image instead, the first one of the call, as the pipeline would decode the
    estimate; the last step has none.

    `receive(step, steps, latents)` is called in the job's thread, with a tensor (1, ...) in float32 on the CPU, in the
    layout that the pipeline gives its scheduler: before the last step the scheduler's estimate of the clean latents, if
    it has one (`clean_latents`).
    """

    count: int
    receive: Callable[[int, int, Any], object]
    decoded: bool = False


def preview_steps(count: int, steps: int) -> frozenset[int]:
    """Return the numbers, from 1, of the steps whose latents are previews; none if it is unknown how many there are."""
    if count >= steps:
        return frozenset(range(1, steps + 1)) if count else frozenset()
    between = {number * steps // (count + 1) for number in range(1, count + 1)}
    return frozenset(between - {0} | {steps}) if count and steps else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What one rank returns of one call: statistics, and the output on one rank of each prompt group.

    `figures` are the rank's statistics, or under torchrun those of all participating ranks in order.
    `generators` and `random` are the states after the call of the generators that were passed, and of torch's: the
    caller's generators take them, as if the call had been made there.
    """

    output: Any
    generators: tuple[Any, ...]
    random: RandomState | None = None
    figures: tuple[RankStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The end of a step, for the caller's callback_on_step_end. `facts`: plain attributes of the pipeline."""

    step: int
    timestep: Any
    tensors: dict[str, Any]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewEvent:
    """What `Previews` get of a step: latents (1, ...), or a PIL image of their estimate."""

    step: int
    steps: int
    preview: Any


@dataclass(frozen=True, slots=True)
class CallbackChange:
    """A change of the pipeline by a callback: calls the method `path` with `args` and `kwargs`, or sets an attribute.

    `path` may name a network's method, as in "unet.set_attn_processor". If `kwargs` is None, the attribute `path` is
    set to the only element of `args`.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None = None

    @property
    def is_of_networks(self) -> bool:
        """Whether it may change networks: all but plain attributes of the pipeline."""
        return self.kwargs is not None or "." in self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackResult:
    """What a callback changed: tensors by name, and changes of the pipeline in order."""

    tensors: dict[str, Any]
    changes: tuple[CallbackChange, ...]


@dataclass(frozen=True, slots=True)
class PartName:
    """Stands for a part of the pipeline, such as "text_encoder_2", among the arguments of a method."""

    name: str


@dataclass(frozen=True, slots=True)
class MethodResult:
    """What a method of the pipeline or of a network returned; `itself` if it returned its own object.

    `described`: the pipeline, if its networks are others than before. `generators` and `random`: as of CallResult.
    """

    value: Any = None
    itself: bool = False
    described: Any = None
    generators: tuple[Any, ...] = ()
    random: RandomState | None = None


@dataclass(frozen=True, slots=True)
class FinalState:
    """Ends a call under torchrun: the output of ranks other than 0, and the final states of all generators.

    `failed`: the call has raised an exception on all ranks that take part in it.
    """

    output: Any
    generators: list[Any]
    random: RandomState
    failed: bool = False
