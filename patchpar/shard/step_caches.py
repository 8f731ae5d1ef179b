"""diffusers' step caches, which skip blocks where little changes, on a denoiser split over ranks.

vote        a cache that decides by its tensors decides by those of all ranks: otherwise ranks would wait for others
set aside   caches are disabled while a denoiser is discovered or verified: those calls are no steps
refused     by name: other caches that decide by their own tensors, and any cache beside stale keys
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from torch import Tensor, nn

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.hooks import HookSet, hooks_of
from patchpar.shard.module_tree import modules_of

FOLDER = "diffusers.hooks."
DECIDES_ALIKE = {
    "FirstBlockCacheConfig": "by a vote",
    "MagCacheConfig": "by the number of the step",
    "TaylorSeerCacheConfig": "by the number of the step",
}
KEEPS_ATTENTION = "PyramidAttentionBroadcastConfig"
"""Which it leaves out by the number of the call: with split tokens each rank keeps that of its own."""
BY_STEP = frozenset({"FasterCacheConfig", KEEPS_ATTENTION, "TextKVCacheConfig"})
"""Of a denoiser with whole images these too decide alike on all ranks."""
CONFIGURED_BY = {
    "first_block_cache": "FirstBlockCacheConfig",
    "mag_cache": "MagCacheConfig",
    "taylorseer_cache": "TaylorSeerCacheConfig",
    "faster_cache": "FasterCacheConfig",
    "pyramid_attention_broadcast": "PyramidAttentionBroadcastConfig",
    "sea_cache": "SeaCacheConfig",
    "text_kv_cache": "TextKVCacheConfig",
}
"""By the file that has the hooks of a cache."""
DECISION = "_should_compute_remaining_blocks"


def refuse_caches(denoiser: Any, *, stale: bool, by_tokens: bool = False) -> None:
    """Raise UnsupportedModel for a cache that ranks with different tokens, or bands, would not use alike."""
    name = cache_of(denoiser)
    if name is None:
        return
    config = getattr(denoiser, "_cache_config", None)
    known = {*DECIDES_ALIKE, *([KEEPS_ATTENTION] if by_tokens else [])}
    if name not in known or getattr(config, "calibrate", False):
        raise UnsupportedModel(
            f"{name} cannot be used with axis 'patch', since ranks may decide differently which blocks to skip: use "
            f"{', '.join(sorted(known))}, or cfg=2"
        )
    if stale:
        raise UnsupportedModel(
            f"{name} skips blocks in some steps, so that stale keys may be more than one step old: use strategy "
            "'exact', or transformer.disable_cache()"
        )


def cache_of(denoiser: nn.Module) -> str | None:
    """Return the name of a cache's configuration, also of one that `apply_first_block_cache` installed; else None."""
    config = getattr(denoiser, "_cache_config", None)
    if config is not None:
        return type(config).__name__
    return next((CONFIGURED_BY[file] for file, _ in _hooks_by_file(denoiser) if file in CONFIGURED_BY), None)


class CacheVote:
    """Makes the first-block caches of a denoiser decide alike on the ranks of `axes`, those of `cfg` for a whole batch.

    Their criterion, the mean change of the first block's residual, is computed over the prompts and tokens of all
    ranks, so the decision is that of plain diffusers.
    """

    def __init__(self, denoiser: nn.Module, comm: Communicator, axes: Sequence[Axis], clock: StepClock) -> None:
        self.denoiser, self.comm, self.clock, self.axes = denoiser, comm, clock, tuple(axes)

    def renew(self) -> None:
        """Install the vote in the caches that are enabled now. Raises UnsupportedModel for those that have none."""
        self._refuse_others()
        for hook in _cache_hooks(self.denoiser):
            if isinstance(hook, FBCHeadBlockHook):
                setattr(hook, DECISION, partial(self._decide, hook))

    def restore(self) -> None:
        """Remove the vote: each rank decides by its own tensors."""
        for hook in _cache_hooks(self.denoiser):
            vars(hook).pop(DECISION, None)

    def _refuse_others(self) -> None:
        """Raise UnsupportedModel for a cache that decides by tensors of all prompts or branches, and has no vote."""
        name, batch = cache_of(self.denoiser), [axis for axis in self.axes if axis.name != "patch" and axis.size > 1]
        if name is not None and any(axis.name == "cfg" for axis in batch) and _reads_both_branches(self.denoiser):
            raise UnsupportedModel(
                f"{name} cannot be used with axis 'cfg': it computes the branch without the prompt from the other one, "
                f"and takes each half of a batch for one of them: use {', '.join(sorted(DECIDES_ALIKE))}, or data=N"
            )
        if name is None or not batch or name in DECIDES_ALIKE or name in BY_STEP:
            return
        plan = ",".join(f"{axis.name}={axis.size}" for axis in batch)
        raise UnsupportedModel(
            f"{name} cannot be used with {plan}: it may decide by the whole batch which blocks to skip, of which each "
            f"rank has a part: use {', '.join(sorted(DECIDES_ALIKE))}, or one device"
        )

    def _decide(self, hook: Any, residual: Tensor) -> bool:
        """Whether to compute the remaining blocks. Raises ExchangeError."""
        before = hook.state_manager.get_state().head_block_residual
        if before is None:
            return True
        change, size = self._sum_over_ranks([_magnitude(residual - before), _magnitude(before)])
        return bool(change / size > hook.threshold)

    def _sum_over_ranks(self, own: Sequence[Tensor]) -> Tensor:
        votes = torch.stack(list(own))
        for axis in self.axes:
            if axis.name == "cfg" and self.clock.branches == 1:
                continue  # each rank has calls of its own
            votes = torch.stack(AllGather(self.comm, axis, "cache", "vote on a cached step").same(votes)).sum(0)
        return votes


@contextmanager
def caches_set_aside(denoiser: nn.Module) -> Iterator[None]:
    """Context in which no cache skips blocks or changes its state."""
    with HookSet() as hooks:
        for hook in _cache_hooks(denoiser):
            if hook.fn_ref.original_forward is not None:
                hooks.replace(hook.fn_ref, "forward", hook.fn_ref.original_forward)
        yield


def _magnitude(x: Tensor) -> Tensor:
    """Return the sum of |x|: of all tokens it exceeds the largest number of float16."""
    return x.abs().sum(dtype=torch.float32)


def _cache_hooks(denoiser: nn.Module) -> list[Any]:
    return [hook for file, hook in _hooks_by_file(denoiser) if file in CONFIGURED_BY]


def _reads_both_branches(denoiser: nn.Module) -> bool:
    """Whether a cache has been told that a batch is both branches of guidance, as FasterCache is by default."""
    return any(getattr(hook, "is_guidance_distilled", True) is False for hook in _cache_hooks(denoiser))


def counts_calls(denoiser: nn.Module) -> str | None:
    """Return the name of a cache that counts calls, and keeps attention, of all branches together; else None."""
    name = cache_of(denoiser)
    return name if name in ("FasterCacheConfig", KEEPS_ATTENTION) else None


def refuse_counting(name: str | None, size: int) -> None:
    """Raise UnsupportedModel for such a cache where each of `size` ranks has the calls of one guidance branch."""
    if name is not None:
        raise UnsupportedModel(
            f"{name} cannot be used with cfg={size} in a pipeline that calls the denoiser once for each guidance "
            "branch: it counts the calls of all branches, of which each rank has its own: use "
            f"{', '.join(sorted(DECIDES_ALIKE))}, or data=N"
        )


def _hooks_by_file(denoiser: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield diffusers' hooks of a denoiser, each with the file that has its class."""
    for module in modules_of(denoiser):
        for _, hook in hooks_of(module):
            yield type(hook).__module__.removeprefix(FOLDER), hook
