"""The arguments of a pipeline's first call of a denoiser, without values, and a small size for it."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.models.dry_run.dry_run import needing_values, on_the_cpu, with_few_steps
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import MetaMode
from patchpar.shard.hooks import HookSet
from patchpar.shard.transformer.probe.capture import CallArguments

SIDE = 16
"""Of the latent."""
FRAMES = 17
"""Of a video: as many as a multiple of 4 or of 8 frames and one before."""
SPLIT = "its split cannot be found"


def first_call(pipe: Any, denoiser: nn.Module, kwargs: Mapping[str, Any], otherwise: str = SPLIT) -> CallArguments:
    """Return the arguments of the first call of a denoiser of `pipe`, which is on the meta device.

    Raises UnsupportedModel where it is not called (`otherwise`: what then cannot be done), or where the pipeline's code
    needs values.
    """
    mode = MetaMode(LiveBytes(""))
    with needing_values(pipe), on_the_cpu(pipe), torch.no_grad(), mode.functions(), mode:
        return arguments_of_first_call(denoiser, partial(pipe, **with_few_steps(pipe, kwargs, 1)), otherwise)


def arguments_of_first_call(denoiser: nn.Module, run: Callable[[], Any], otherwise: str = SPLIT) -> CallArguments:
    """Return the arguments of the first call of a denoiser in `run`, which ends there.

    Raises UnsupportedModel where it is not called; `otherwise`: see `first_call`.
    """
    calls: list[CallArguments] = []

    def first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(CallArguments.of(module, args, kwargs))
        raise _FirstCall

    with HookSet() as hooks, suppress(_FirstCall):
        hooks.before(denoiser, first, with_kwargs=True)
        run()
    if not calls:
        raise UnsupportedModel(f"{type(denoiser).__name__} was not called, so that {otherwise}")
    return calls[0]


def small_size(pipe: Any, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of a small call. One that follows from another argument, such as an image, stays."""
    names, side = inspect.signature(type(pipe).__call__).parameters, SIDE * getattr(pipe, "vae_scale_factor", 8)
    given = {name: side for name in ("height", "width") if name in names}
    given = {name: min(size, kwargs.get(name) or size) for name, size in given.items()}
    if "num_frames" in names:
        given["num_frames"] = min(FRAMES, kwargs.get("num_frames") or FRAMES)
    return given


class _FirstCall(Exception):
    """The denoiser is called."""
