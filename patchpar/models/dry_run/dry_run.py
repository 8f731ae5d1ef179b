"""A call of a pipeline without weights: the pipeline's own code runs, its networks compute nothing.

    pipe = empty_pipeline(folder, options)             # networks from their configurations, on the meta device
    found = dry_run(pipe, prompt="a fox", height=2048, width=2048)
    found.peak_bytes                                    # of activations; weights come on top

It holds for any pipeline at any size, whether the model fits this machine or not, since nothing is written per model.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.models.dry_run.call_memory import CallMemory
from patchpar.models.dry_run.kept_tokens import Attentions, AttentionSize
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import META, MetaMode
from patchpar.models.info import denoisers_of, networks_of
from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import modules_of
from patchpar.shard.sdpa import AttentionCall

ENCODE, DENOISE, DECODE = "encode", "denoise", "decode"
STEPS = 2  # enough for what the scheduler keeps of a step for the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a call does on one device. `weight_bytes` of each network, by its name.

    `peak_bytes`: the most that tensors take beside the weights, in each phase: before the first call of a denoiser,
    until the end of its last call, and after it. `calls` of denoisers, and the FLOPs of one of them. `attentions`: of
    tokens to themselves in one step, with how many there are of each size.
    """

    weight_bytes: Mapping[str, int]
    peaks: Mapping[str, int]
    calls: int
    flops_per_call: float
    attentions: Attentions

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors beside the weights."""
        return max(self.peaks.values())

    @property
    def memory(self) -> CallMemory:
        """What a rank of a plan takes depends on this."""
        return CallMemory(**self.peaks, attentions=self.attentions)


def dry_run(pipe: Any, **kwargs: Any) -> DryRun:
    """Call a pipeline with `kwargs` without computing. Its networks are on the meta device afterwards.

    It takes at most STEPS steps, also where `kwargs` do not say how many. Raises UnsupportedModel if the pipeline's
    code needs values that only a real run has, and the pipeline's own exceptions for arguments that it refuses.
    """
    networks = emptied(pipe)
    memory = LiveBytes(ENCODE)
    mode, hooks, counted = MetaMode(memory), HookSet(), _DenoiserCalls()
    for denoiser in denoisers_of(pipe).values():
        hooks.before(denoiser, lambda *_: counted.begin(mode))
        hooks.after(denoiser, lambda *_: counted.end(mode))
    few_steps = with_few_steps(pipe, kwargs)
    attend = partial(counted.attend, mode.attend)
    with needing_values(pipe), hooks, on_the_cpu(pipe), torch.no_grad(), mode.functions(attend=attend), mode:
        pipe(**few_steps)
    return DryRun(
        weight_bytes={name: weight_bytes(network) for name, network in networks.items()},
        peaks=dict(memory.peaks),
        calls=counted.calls,
        flops_per_call=counted.flops / max(1, counted.calls),
        attentions=counted.attentions_of(few_steps.get("num_inference_steps", 1)),
    )


def emptied(pipe: Any) -> dict[str, nn.Module]:
    """Move the networks of a pipeline to the meta device, and return them by name."""
    networks = networks_of(pipe)
    for network in networks.values():
        if not all(x.is_meta for x in weight_tensors(network)):
            network.to(META)
    return networks


def weight_tensors(network: nn.Module) -> Iterator[Tensor]:
    """Yield all parameters and buffers, of any shape; one that several modules have, for each of them."""
    for module in modules_of(network):
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                yield x


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; tied ones count once."""
    tensors = {id(x): x for x in (*network.parameters(), *network.buffers())}
    return sum(x.numel() * x.element_size() for x in tensors.values())


def with_few_steps(pipe: Any, kwargs: Mapping[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Return the arguments of a call of `pipe` with at most so many steps, also where `kwargs` do not say how many."""
    if "num_inference_steps" not in inspect.signature(type(pipe).__call__).parameters:
        return dict(kwargs)
    return {**kwargs, "num_inference_steps": min(steps, kwargs.get("num_inference_steps") or steps)}


@contextmanager
def needing_values(pipe: Any) -> Iterator[None]:
    """Context in which code of a pipeline runs without values. Raises UnsupportedModel where it fails by that."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        raise _needs_values(pipe, error) from error
    except ValueError as error:
        if f"{META} device" not in str(error):
            raise
        raise _needs_values(pipe, error) from error


def _needs_values(pipe: Any, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(pipe).__name__} needs values that only a real call has, so that its memory and work cannot be found "
        f"without one: {error}"
    )


class _DenoiserCalls:
    """Counts calls, FLOPs and attentions of all denoisers, and says where the phases begin."""

    def __init__(self) -> None:
        self.calls, self.flops, self._before = 0, 0, 0
        self._attentions: Counter[AttentionSize] = Counter()
        self._is_inside = False

    def begin(self, mode: MetaMode) -> None:
        mode.memory.enter(DENOISE)
        mode.memory.merge(DECODE, into=DENOISE)  # what followed the last call was a part of its step
        self.calls, self._before, self._is_inside = self.calls + 1, mode.flops, True

    def end(self, mode: MetaMode) -> None:
        self._is_inside = False
        self.flops += mode.flops - self._before
        mode.memory.enter(DECODE)

    def attend(self, attend: Callable[[AttentionCall], Tensor], call: AttentionCall) -> Tensor:
        size = AttentionSize.of(call) if self._is_inside else None
        if size is not None:
            self._attentions[size] += 1
        return attend(call)

    def attentions_of(self, steps: int) -> dict[AttentionSize, int]:
        """Return those of one of so many steps."""
        return {size: -(-count // steps) for size, count in self._attentions.items()}


@contextmanager
def on_the_cpu(pipe: Any) -> Iterator[None]:
    """Context in which the pipeline takes the CPU for its device: the values of its own tensors are real.

    So do pipelines that it has and calls.
    """
    parts = [pipe, *(each for each in vars(pipe).values() if isinstance(each, DiffusionPipeline))]
    kinds, cpu = [type(each) for each in parts], property(lambda _: torch.device("cpu"))
    for each, kind in zip(parts, kinds, strict=True):
        each.__class__ = type(
            kind.__name__, (kind,), {"device": cpu, "_execution_device": cpu, "__module__": kind.__module__}
        )
    try:
        yield
    finally:
        for each, kind in zip(parts, kinds, strict=True):
            each.__class__ = kind
