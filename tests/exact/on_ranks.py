"""What the ranks of these tests run: one denoiser in bands, against the same denoiser by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import (
    Attention,
    AttnAddedKVProcessor,
    AttnProcessor,
    CustomDiffusionAttnProcessor,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as attention_by_another_name
from torch.utils._pytree import tree_map_only

from patchpar.errors import PatchparError
from patchpar.plan.step_clock import StepClock
from patchpar.shard.unet import layer_hooks, layers
from patchpar.shard.unet.denoiser import PatchedDenoiser
from patchpar.shard.unet.layers import convolve
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies import parse_strategy
from patchpar.strategies.exact import ExactPatch
from tests.exact import denoisers
from tests.ranks import PoolRank
from tests.tensors import relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of one size: in bands, and with every band alone."""

    split: float
    alone: float


def first(output: Any) -> Tensor:
    return output[0]


def patched(
    this: PoolRank,
    denoiser: nn.Module,
    split: str = "auto",
    verifications: VerificationCache | None = None,
    strategy: ExactPatch | None = None,
) -> PatchedDenoiser:
    axis = this.mesh(patch=this.world)["patch"]
    return (strategy or ExactPatch()).install(denoiser, this.comm(), axis, split=split, verifications=verifications)


@torch.no_grad()
def parity(
    this: PoolRank,
    name: str,
    sizes: Sequence[tuple[int, int]],
    split: str = "auto",
    strategy: ExactPatch | None = None,
    change: str = "",
) -> list[Errors]:
    denoiser = denoisers.build(name)
    if change:
        CHANGES[change](denoiser)
    bands = patched(this, denoiser, split, strategy=strategy)
    found = []
    for height, width in sizes:
        call = denoisers.call(name, height, width)
        bands.restore()
        whole = first(denoiser(**call))
        errors = []
        for bands.exchange in ("on", "off"):
            errors.append(relative(first(bands.denoise(denoiser.forward, **call)), whole))
        found.append(Errors(split=errors[0], alone=errors[1]))
        bands.exchange = "on"
    return found


@torch.no_grad()
def channels_last_with_joined_halos(this: PoolRank, name: str) -> tuple[float, list[str]]:
    """The error where every band is joined with its halo, as on GPUs; and formats of maps that convolutions read.

    "kept" are channels last in bands and whole, "other" are contiguous in both, "lost" differ.
    """
    denoiser, call = denoisers.build(name).to(memory_format=torch.channels_last), denoisers.call(name, 12, 8)
    whole_formats, found = {}, []

    def note(conv: nn.Module, args: Any) -> None:
        whole_formats[conv] = args[0].is_contiguous(memory_format=torch.channels_last)

    def noted(conv: nn.Module, x: Tensor, dim: int) -> Tensor:
        kept = x.is_contiguous(memory_format=torch.channels_last)
        found.append("lost" if kept != whole_formats[conv] else "kept" if kept else "other")
        return convolve(conv, x, dim)

    handles = [each.register_forward_pre_hook(note) for each in denoiser.modules() if isinstance(each, nn.Conv2d)]
    whole = first(denoiser(**call))
    for handle in handles:
        handle.remove()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_hooks, "copies_band", lambda conv, x, *, has_halo: True)
        patch.setattr(layers, "convolve", noted)
        bands = first(patched(this, denoiser).denoise(denoiser.forward, **call))
    return relative(bands, whole), found


@torch.no_grad()
def in_half_precision(this: PoolRank, name: str, dtype: torch.dtype) -> Errors:
    """Errors against the same half-precision weights computed in fp64: in bands, and (as `alone`) whole."""
    denoiser = denoisers.build(name).to(dtype)
    call = tree_map_only(Tensor, lambda x: x.to(dtype), denoisers.call(name, 20, 8))
    whole = first(denoiser(**call))
    bands = first(patched(this, denoiser).denoise(denoiser.forward, **call))
    oracle_call = tree_map_only(Tensor, lambda x: x.double(), call)
    oracle = first(denoisers.build(name).to(dtype).double()(**oracle_call))
    return Errors(split=relative(bands, oracle), alone=relative(whole, oracle))


@torch.no_grad()
def in_double_precision(this: PoolRank, name: str, folder: str) -> Errors:
    """Errors in fp64, verified first: in bands, and (as `alone`) with every band alone."""
    denoiser = denoisers.build(name).double()
    call = tree_map_only(Tensor, lambda x: x.double(), denoisers.call(name, 20, 12))
    whole, errors = first(denoiser(**call)), []
    bands = patched(this, denoiser, verifications=VerificationCache(Path(folder) / str(this.rank)))
    for bands.exchange in ("on", "off"):
        errors.append(relative(first(bands.denoise(denoiser.forward, **call)), whole))
    return Errors(split=errors[0], alone=errors[1])


@torch.no_grad()
def with_weights_in(this: PoolRank, name: str, storage: torch.dtype, when: str, folder: str) -> Errors:
    """Errors of weights that are kept in a smaller dtype, and computed with in fp32; `alone`: to those that are not."""
    denoiser, call = denoisers.build(name), denoisers.call(name, 20, 12)
    untouched = first(denoiser(**call))
    bands = patched(this, denoiser, verifications=VerificationCache(Path(folder) / str(this.rank)))
    if when == "after":
        bands.denoise(denoiser.forward, **call)
        bands.forget()
    denoiser.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    whole = first(denoiser(**call))
    return Errors(
        split=relative(first(bands.denoise(denoiser.forward, **call)), whole), alone=relative(untouched, whole)
    )


@torch.no_grad()
def verified(this: PoolRank, name: str, folder: str, change: str = "") -> list[float | str]:
    """Install twice with verdicts kept in `folder`; what each found, and how many forwards each took."""
    found: list[Any] = []
    for _ in range(2):
        denoiser = denoisers.build(name)
        if change:
            CHANGES[change](denoiser)
        bands = patched(this, denoiser, verifications=VerificationCache(Path(folder) / str(this.rank % 2)))
        count = Counted(denoiser)
        try:
            bands.denoise(count, **denoisers.call(name, 8 * this.world, 8))
            found.append((bands.error, count.calls))
        except PatchparError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class Counted:
    """A denoiser's forward that counts its calls."""

    def __init__(self, denoiser: nn.Module) -> None:
        self.denoiser, self.calls = denoiser, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.denoiser.forward(*args, **kwargs)


class Centred(nn.Module):
    """Takes the mean over the image away: it mixes positions in a way that nobody told patchpar of."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((-2, -1), keepdim=True)


class Pooled(nn.Module):
    """Adds what the whole image looks like on average, as squeeze-and-excitation does."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.pool(x))


def _centre(denoiser: Any) -> None:
    denoiser.conv_in = nn.Sequential(denoiser.conv_in, Centred())


def _pool(denoiser: Any) -> None:
    denoiser.mid_block.resnets[0].nonlinearity = nn.Sequential(nn.SiLU(), Pooled())


def _replicate(denoiser: Any) -> None:
    denoiser.conv_out.padding_mode = "replicate"


class Cosines:
    """Attention of somebody's own, that calls nothing of torch's: by how alike queries and keys are."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key = (F.normalize(x, dim=-1) for x in (attn.to_q(hidden_states), attn.to_k(context)))
        weights = torch.softmax(8 * torch.einsum("blc,bkc->blk", query, key), dim=-1)
        return attn.to_out[0](torch.einsum("blk,bkc->blc", weights, attn.to_v(context)))


class Unprojected(Cosines):
    """Keys and values that no layer of the model's makes."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        if encoder_hidden_states is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states)
        weights = torch.softmax(hidden_states @ hidden_states.mT, dim=-1)
        return attn.to_out[0](weights @ hidden_states)


class OneHead:
    """Attention of somebody's own with torch's function, which it has imported by another name."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        found = attention_by_another_name(*(x.unsqueeze(1) for x in (query, key, value)))
        return attn.to_out[0](found.squeeze(1))


def _processor(make: Callable[[], Any]) -> Callable[[Any], None]:
    def change(denoiser: Any) -> None:
        for module in denoiser.modules():  # UNet2DModel has no set_attn_processor
            if isinstance(module, Attention):
                module.set_processor(make())

    return change


def _sliced(denoiser: Any) -> None:
    denoiser.set_attention_slice(1)


def _widen(denoiser: Any) -> None:
    resnet = denoiser.mid_block.resnets[0]
    resnet.conv1 = nn.Conv2d(resnet.in_channels, resnet.out_channels, 5, padding=2)


CHANGES: dict[str, Callable[[Any], None]] = {
    "centred": _centre,
    "pooled": _pool,
    "replicate": _replicate,
    "products": _processor(AttnProcessor),
    "sliced": _sliced,
    "custom diffusion": _processor(lambda: CustomDiffusionAttnProcessor(train_kv=False, train_q_out=False)),
    "cosines": _processor(Cosines),
    "one head": _processor(OneHead),
    "unprojected": _processor(Unprojected),
    "products, added keys": _processor(AttnAddedKVProcessor),
    "widened": _widen,
    "fused": lambda denoiser: denoiser.fuse_qkv_projections(),
}


@torch.no_grad()
def restored(this: PoolRank, name: str) -> dict[str, bool]:
    """What of the denoiser is as before while it is in bands, and after."""
    denoiser = denoisers.build(name)
    call = denoisers.call(name, 16, 8)
    before, keys, types = first(denoiser(**call)), list(denoiser.state_dict()), module_types(denoiser)
    traces = attributes(denoiser)
    bands = patched(this, denoiser)
    bands.denoise(denoiser.forward, **call)
    during = {"keys": list(denoiser.state_dict()) == keys, "types": module_types(denoiser) == types}
    hooked = attributes(denoiser) != traces
    bands.restore()
    bands.restore()
    return during | {
        "hooked meanwhile": hooked,
        "bit-equal": torch.equal(first(denoiser(**call)), before),
        "no trace": attributes(denoiser) == traces,
        "in bands again": relative(first(bands.denoise(denoiser.forward, **call)), before) < 1e-5,
    }


def module_types(model: nn.Module) -> dict[str, type]:
    return {path: type(module) for path, module in model.named_modules()}


def attributes(model: nn.Module) -> dict[str, list[str]]:
    return {path: sorted(vars(module)) for path, module in model.named_modules()}


@torch.no_grad()
def loaded_meanwhile(this: PoolRank) -> float:
    """Other weights, loaded by their usual keys while the seams are in."""
    denoiser, call = denoisers.build("sd"), denoisers.call("sd", 16, 8)
    bands = patched(this, denoiser)
    bands.denoise(denoiser.forward, **call)
    other = denoisers.build("sd")
    for parameter in other.parameters():
        parameter.mul_(1.1)
    denoiser.load_state_dict(other.state_dict())
    return relative(first(bands.denoise(denoiser.forward, **call)), first(other(**call)))


@torch.no_grad()
def refused(this: PoolRank, name: str, height: int, width: int, arguments: dict[str, Any]) -> str:
    denoiser = denoisers.build(name)
    try:
        patched(this, denoiser).denoise(denoiser.forward, **denoisers.call(name, height, width), **arguments)
    except PatchparError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@torch.no_grad()
def refused_with(this: PoolRank, name: str, change: str, strategy: str) -> str:
    """A strategy with a denoiser that has been changed: what is said of it, and what is left in it."""
    denoiser = denoisers.build(name)
    CHANGES[change](denoiser)
    axis = this.mesh(patch=this.world)["patch"]
    layer = parse_strategy(strategy).install(denoiser, this.comm(), axis, clock=StepClock())
    traces = attributes(denoiser)
    try:
        layer.denoise(denoiser.forward, **denoisers.call(name, 16, 8))
    except PatchparError as error:
        return f"{type(error).__name__}: {error}" + (", and hooks are left" if attributes(denoiser) != traces else "")
    return "not refused"
