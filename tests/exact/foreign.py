"""What other libraries, or a user's own lines, put into a denoiser: each works on the whole image from inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.errors import PatchparError
from patchpar.shard.unsupported_model import refused_in_words
from patchpar.shard.verification_cache import VerificationCache
from tests.exact import denoisers
from tests.exact.on_ranks import first, patched
from tests.ranks import PoolRank
from tests.tensors import relative

SIZE = (16, 8)
LARGE = (32, 16)


def centred(x: Tensor) -> Tensor:
    """Without its mean over the image."""
    return x - x.mean((-2, -1), keepdim=True)


def blurred(x: Tensor) -> Tensor:
    """Its low frequencies only."""
    kept = torch.zeros(x.shape[-2:])
    kept[:2, :2] = 1
    return torch.fft.ifftn(torch.fft.fftn(x, dim=(-2, -1)) * kept, dim=(-2, -1)).real


class CentredAttention:
    """An attention processor that takes the mean over all tokens away."""

    def __init__(self) -> None:
        self.inner = AttnProcessor2_0()

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.inner(attn, hidden_states, *args, **kwargs)
        return out - out.mean(1, keepdim=True)


class CentringHook(ModelHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return centred(output)


Plant = Callable[[Any], Callable[[], None]]


def _forward(unet: Any) -> Callable[[], None]:
    block = unet.mid_block.resnets[0]
    own = block.forward
    block.forward = lambda *args, **kwargs: centred(own(*args, **kwargs))
    return lambda: None


def _large_only(unet: Any) -> Callable[[], None]:
    """Works at sizes only that are larger than those a denoiser is checked at."""
    block = unet.up_blocks[-1].resnets[0]
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out = own(*args, **kwargs)
        return centred(out) if out.shape[-1] >= LARGE[1] else out

    block.forward = forward
    return lambda: None


def _filter(unet: Any) -> Callable[[], None]:
    block = unet.mid_block.resnets[0]
    own = block.forward
    block.forward = lambda *args, **kwargs: blurred(own(*args, **kwargs))
    return lambda: None


def _hook(unet: Any) -> Callable[[], None]:
    unet.mid_block.resnets[0].register_forward_hook(lambda module, args, output: centred(output))
    return lambda: None


def _pre_hook(unet: Any) -> Callable[[], None]:
    unet.mid_block.resnets[0].register_forward_pre_hook(lambda module, args: (centred(args[0]), *args[1:]))
    return lambda: None


def _diffusers_hook(unet: Any) -> Callable[[], None]:
    HookRegistry.check_if_exists_or_initialize(unet.mid_block.resnets[0]).register_hook(CentringHook(), "centring")
    return lambda: None


def _processor(unet: Any) -> Callable[[], None]:
    unet.set_attn_processor(CentredAttention())
    return lambda: None


def _method_of_class(unet: Any) -> Callable[[], None]:
    own = ResnetBlock2D.forward
    ResnetBlock2D.forward = lambda self, *args, **kwargs: centred(own(self, *args, **kwargs))

    def undo() -> None:
        ResnetBlock2D.forward = own

    return undo


def _function_of_torch(unet: Any) -> Callable[[], None]:
    own = F.interpolate
    F.interpolate = lambda x, *args, **kwargs: centred(own(x, *args, **kwargs))

    def undo() -> None:
        F.interpolate = own

    return undo


def _other_class(unet: Any) -> Callable[[], None]:
    """As tomesd does it."""
    block = unet.mid_block.resnets[0]

    class Merging(type(block)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return centred(super().forward(*args, **kwargs))

    block.__class__ = Merging
    return lambda: None


PLANTS: dict[str, Plant] = {
    "forward": _forward,
    "forward at large sizes": _large_only,
    "filter": _filter,
    "hook": _hook,
    "pre-hook": _pre_hook,
    "diffusers hook": _diffusers_hook,
    "processor": _processor,
    "method of a class": _method_of_class,
    "function of torch": _function_of_torch,
    "another class": _other_class,
}


@contextmanager
def planted(unet: Any, kind: str) -> Iterator[None]:
    undo = PLANTS[kind](unet)
    try:
        yield
    finally:
        undo()


@torch.no_grad()
def found(this: PoolRank, kind: str, when: str, folder: str) -> dict[str, Any]:
    """What is said of a denoiser with something put into it before or after a first verified call, or its error."""
    unet, call = denoisers.build("sd"), denoisers.call("sd", *LARGE)
    plain = first(unet(**call))
    verifications = VerificationCache(Path(folder) / str(this.rank))
    bands = patched(this, denoisers.build("sd") if when == "before" else unet, verifications=verifications)
    bands.reset()
    untouched = relative(first(bands.denoise(bands.denoiser.forward, **call)), plain)
    if when == "before":
        bands = patched(this, unet, verifications=verifications)
    with planted(unet, kind):
        bands.reset()
        whole = partial(unet.forward, **call)
        try:
            with refused_in_words(unet, f"patch={this.world}", "Use plan cfg=2", whole):  # as the denoiser's hook does
                got = first(bands.denoise(unet.forward, **call))
        except PatchparError as error:
            return {"untouched": untouched, "message": f"{type(error).__name__}: {error}"}
        bands.restore()
        want = first(unet(**call))
    return {"untouched": untouched, "error": relative(got, want), "effect": relative(want, plain)}


class _Later:
    """Changes what a block returns from the second call of the network on."""

    def __init__(self, unet: Any, change: Callable[[Tensor], Tensor]) -> None:
        self.calls, self._change, block = 0, change, unet.mid_block.resnets[0]
        self._own = block.forward
        block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        out = self._own(*args, **kwargs)
        return self._change(out) if self.calls > 1 else out


LATER: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: x * 0.5,
    "centred": centred,
    "at large sizes": lambda x: centred(x) if x.shape[-1] > 2 else x,
}


@torch.no_grad()
def found_in_short_memory(this: PoolRank, kind: str, folder: str) -> dict[str, Any]:
    """What three calls return where the last rank has no memory for a plain call, and how often it runs the network."""
    unet, call, runs = denoisers.build("sd"), denoisers.call("sd", *LARGE), list[tuple[int, ...]]()
    plain = first(unet(**call))
    bands = patched(this, unet, verifications=VerificationCache(Path(folder) / str(this.rank)))
    changing = _Later(unet, LATER[kind])

    def forward(*args: Any, **kwargs: Any) -> Any:
        size = tuple(kwargs["sample"].shape[-2:])
        runs.append(size)
        if size == LARGE and this.rank == this.world - 1:
            raise torch.OutOfMemoryError("too little")
        return unet.forward(*args, **kwargs)

    outputs, each = [], []
    bands.reset()
    for _ in range(3):
        try:
            runs.clear()
            outputs.append(first(bands.denoise(forward, **call)))
            each.append(list(runs))
        except PatchparError as error:
            return {"message": f"{type(error).__name__}: {error}"}
    bands.restore()
    changing.calls = 1
    want = first(unet(**call))
    errors = [relative(outputs[0], plain), *(relative(x, want) for x in outputs[1:])]
    return {"errors": errors, "effect": relative(want, plain), "runs": each}
