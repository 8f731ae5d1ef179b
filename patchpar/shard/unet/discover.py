"""Find the modules of a denoiser that mix positions of the image, by hooks in a run, not by class names.

The denoiser runs twice on inputs as small as its total stride allows, the second twice as tall. Shapes that grow with
the height are spatial:

    group norm     same batch, more values per sample    -> its moments span all bands
    attention      same batch, more tokens, self         -> its keys span all bands
                   more samples, same tokens             -> temporal, each pixel independent; no exchange
    convolution    kernel > 1 along the split dim        -> reads a halo
    transform      torch.fft of a map                    -> needs the whole map
    pooling        output of one size from maps of all   -> needs the whole map

A group norm whose output reaches a convolution through pointwise activations only is linked to it, so that both
exchange in one round.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import modules_of
from patchpar.shard.unet.attention_layers import TOKEN_LAYERS, ObservedAttention, attention_watched
from patchpar.shard.unet.spatial_arguments import as_large_as_the_latent, map_of, with_sample_size
from patchpar.shard.unet.whole_maps import TransformsMode, modules_with_transforms
from patchpar.shard.unsupported_model import is_of_the_split

POINTWISE = (nn.SiLU, nn.GELU, nn.ReLU, nn.Mish, nn.Dropout, nn.Identity, nn.Tanh, nn.Sigmoid)
PROBE_SIZES = (8, 16, 32)  # latent rows and columns, smallest first: the last is enough for a total stride of 32
LEAST_ROWS = 2  # of the map that a convolution reads: one row may be what is left of less than one


@dataclass(frozen=True, slots=True)
class NormSite:
    """A group norm over the whole image, and the convolutions it feeds through `activations`, if any.

    There are several where an adapter has a convolution beside the layer it adapts.
    """

    path: str
    convs: tuple[str, ...]
    activations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConvSite:
    """A convolution that may read beyond this rank's band. `trailing`: zero rows that the model appends before it."""

    path: str
    reads_sample: bool
    trailing: int


@dataclass(frozen=True, slots=True)
class ExchangeSites:
    """Every module in which a denoiser needs other ranks' values, and its total stride.

    `transforms`: modules in whose forward maps go through torch.fft. `own_kernel`: those of the `attentions` whose
    processors compute attention without scaled_dot_product_attention. `elsewhere`: those that call it by another name
    than that in torch.nn.functional. `calls`: the attention layer of each call of that function, in the order of the
    calls. `pools`: modules that pool maps to one size.
    `beside`: paths of arguments that are maps of the image beside the latent, from `as_large_as_the_latent`.
    `kv_sizes`: tokens times channels of each of the `attentions`, at the size of the probe.
    """

    norms: tuple[NormSite, ...]
    convs: tuple[ConvSite, ...]
    attentions: tuple[str, ...]
    total_stride: int
    transforms: tuple[str, ...] = ()
    own_kernel: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    calls: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    kv_sizes: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return one line for `explain`."""
        linked = sum(bool(norm.convs) for norm in self.norms)
        transforms = f"{len(self.transforms)} with Fourier transforms, " if self.transforms else ""
        pools = f"{len(self.pools)} poolings of whole maps, " if self.pools else ""
        return (
            f"{len(self.convs)} convolutions, {len(self.norms)} group norms ({linked} in one round with their "
            f"convolution), {len(self.attentions)} self-attentions, {transforms}{pools}total stride {self.total_stride}"
        )


@dataclass(slots=True)
class _ProbedRun:
    """Observations of one probe, by module path."""

    norms: dict[str, tuple[int, ...]] = field(default_factory=dict)
    convs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attention: ObservedAttention = field(default_factory=ObservedAttention)
    maps: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)  # in and out of modules without children
    has_transforms: bool = False
    links: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)  # norm -> convolution -> activations
    reads_sample: set[str] = field(default_factory=set)
    origins: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)  # id of a tensor -> norm, activations
    kept: list[Tensor] = field(default_factory=list)  # keeps those ids from being used again

    # --- forward hooks of the module at `path`; its maps are [B, C, ..., H, W] ---------------------------------------

    def note_norm(self, path: str, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        """Note a group norm."""
        self.norms[path] = tuple(args[0].shape)
        self.origins[id(output)] = (path, ())
        self.kept.append(output)

    def note_pointwise(self, path: str, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        """Note an activation between a norm and a convolution."""
        origin = self.origins.get(id(args[0]))
        if origin is not None:
            self.origins[id(output)] = (origin[0], (*origin[1], path))
            self.kept.append(output)

    def note_map(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note the sizes of a map before and after another module."""
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].ndim >= 4 and isinstance(output, Tensor):
            self.maps[path] = (tuple(args[0].shape), tuple(output.shape))

    def note_conv(self, path: str, sample: Tensor, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        """Note a convolution in a run on `sample`."""
        self.convs[path] = tuple(args[0].shape)
        if _is_sample(args[0], sample):
            self.reads_sample.add(path)
        origin = self.origins.get(id(args[0]))
        if origin is not None:
            self.links.setdefault(origin[0], {})[path] = origin[1]


def discover(denoiser: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> ExchangeSites:
    """Run `forward` at two small sizes and return the spatial modules. Raises UnsupportedModel."""
    size, first, second, beside = _probed(denoiser, forward, args, kwargs)
    norms = [path for path in first.norms if _grows_per_sample(first.norms[path], second.norms.get(path))]
    convs = {path: shape for path, shape in first.convs.items() if _grows_in_rows(shape, second.convs[path])}
    if not convs:
        raise UnsupportedModel(
            f"{type(denoiser).__name__} has no convolution over rows: bands of rows are for UNets. Use cfg or data"
        )
    rows = {path: shape[-2] for path, shape in convs.items()}
    stride = size // min(rows.values())
    modules: dict[str, Any] = dict(denoiser.named_modules())
    small = with_sample_size(args, kwargs, (size, size), beside=beside)
    transforms = (
        modules_with_transforms(denoiser, partial(forward, *small[0], **small[1])) if first.has_transforms else ()
    )
    convs = {path: shape for path, shape in convs.items() if max(modules[path].kernel_size[-2:]) > 1}
    seen, taller = first.attention, second.attention
    _refuse_mixed_layers(denoiser, seen, taller)
    attentions = tuple(path for path in seen.paths() if _grows_per_sample(seen.shape(path), taller.shape(path)))
    return ExchangeSites(
        norms=tuple(_norm_site(path, first.links.get(path, {}), convs) for path in norms),
        convs=tuple(
            ConvSite(path, path in first.reads_sample, rows[path] % 2 if _unpadded(modules[path]) else 0)
            for path in convs
        ),
        attentions=attentions,
        total_stride=stride,
        transforms=transforms,
        own_kernel=frozenset(attentions) - seen.with_kernel,
        elsewhere=frozenset(attentions) & seen.elsewhere,
        calls=tuple(seen.calls),
        beside=beside,
        kv_sizes=tuple(prod((seen.shape(path) or (0, 0))[1:]) for path in attentions),
        pools=tuple(path for path in first.maps if _pools(first.maps[path], second.maps.get(path))),
    )


def _probed(
    denoiser: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[int, _ProbedRun, _ProbedRun, tuple[str, ...]]:
    """Return the size, the observations of two runs, and the arguments that had to be resized with the latent.

    The size is the smallest that the denoiser runs at and that leaves LEAST_ROWS everywhere, if one does. Resizing
    arguments is tried where the denoiser runs at no size without. Raises UnsupportedModel, and what the denoiser raises
    at the size of the call.
    """
    failed: Exception | None = None
    for beside in dict.fromkeys([(), as_large_as_the_latent(args, kwargs)]):
        for size in PROBE_SIZES:
            try:
                first, second = (
                    _probe(denoiser, forward, args, kwargs, (rows, size), beside) for rows in (size, 2 * size)
                )
            except Exception as error:
                if not is_of_the_split(error):
                    raise
                failed = failed or error
                continue
            if size == PROBE_SIZES[-1] or all(shape[-2] >= LEAST_ROWS for shape in first.convs.values()):
                return size, first, second, beside
    with suppress(torch.OutOfMemoryError):  # of one device, which the split would have spared
        forward(*args, **kwargs)  # latents of a wrong shape, say: the denoiser's own error says more
    raise UnsupportedModel(
        f"{type(denoiser).__name__} does not run at the sizes it is probed with, since another argument than the "
        f"latent is as large as the image ({failed}): use plan cfg=2 or data=N"
    ) from failed


def _refuse_mixed_layers(denoiser: nn.Module, seen: ObservedAttention, taller: ObservedAttention) -> None:
    """Raise UnsupportedModel for a module that itself attends to the image in one call and to other tokens in another.

    Its hook would take all of them for the image.
    """
    for path, keys in seen.asked.items():
        grows = {_grows_per_sample(one, other) for one, other in zip(keys, taller.asked.get(path, []), strict=False)}
        if len(grows) > 1:
            raise UnsupportedModel(
                f"{path} in {type(denoiser).__name__} calls scaled_dot_product_attention for the image and for other "
                "tokens, which cannot be told apart: put each call in a module of its own, or use plan cfg=2 or data=N"
            )


def _norm_site(path: str, links: dict[str, tuple[str, ...]], convs: Mapping[str, Any]) -> NormSite:
    links = {conv: activations for conv, activations in links.items() if conv in convs}
    activations = next(iter(links.values()), ())
    return NormSite(path, tuple(conv for conv, own in links.items() if own == activations), activations)


def _unpadded(conv: Any) -> bool:
    return bool(conv.stride[-1] > 1 and max(conv.padding[-2:]) == 0)


def _grows_per_sample(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> bool:
    return before is not None and after is not None and before[0] == after[0] and before != after


def _grows_in_rows(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    return before[:-2] == after[:-2] and before[-1] == after[-1] and before[-2] < after[-2]


def _pools(before: tuple[tuple[int, ...], ...], after: tuple[tuple[int, ...], ...] | None) -> bool:
    return after is not None and _grows_in_rows(before[0], after[0]) and before[1] == after[1]


def _probe(
    denoiser: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    size: tuple[int, int],
    beside: Collection[str],
) -> _ProbedRun:
    seen = _ProbedRun()
    args, kwargs = with_sample_size(args, kwargs, size, beside=beside)
    sample = map_of(args, kwargs)
    with (
        _watched(denoiser, seen, sample),
        attention_watched(denoiser, seen.attention),
        TransformsMode() as transforms,
        torch.no_grad(),
    ):
        forward(*args, **kwargs)
    seen.has_transforms = bool(transforms.found)
    return seen


@contextmanager
def _watched(denoiser: nn.Module, seen: _ProbedRun, sample: Tensor) -> Iterator[None]:
    """Context with torch forward hooks on every module that may be spatial."""
    with HookSet() as hooks:
        for path, module in denoiser.named_modules():
            if isinstance(module, nn.GroupNorm):
                hooks.after(module, partial(seen.note_norm, path))
            elif isinstance(module, (nn.Conv2d, nn.Conv3d)):
                hooks.after(module, partial(seen.note_conv, path, sample))
            elif isinstance(module, POINTWISE):
                hooks.after(module, partial(seen.note_pointwise, path))
            elif not isinstance(module, TOKEN_LAYERS) and not any(module.children()):
                hooks.after(module, partial(seen.note_map, path))
        yield


def _is_sample(x: Tensor, sample: Tensor) -> bool:
    """Whether `x` is the sample, at most with its leading dims flattened.

    A view with frames moved before channels shares its memory too, but has another order.
    """
    same_numbers = x.data_ptr() == sample.data_ptr() and x.numel() == sample.numel()
    return same_numbers and x.is_contiguous() and x.shape[-3:] == sample.shape[-3:]


def splits_into_bands(denoiser: nn.Module) -> bool:
    """Whether a denoiser has padded convolutions and group norms, as UNets have, so that bands may split it."""
    modules = modules_of(denoiser)
    padded = any(isinstance(m, (nn.Conv2d, nn.Conv3d)) and m.kernel_size[-1] > 1 and m.stride[-1] == 1 for m in modules)
    return padded and any(isinstance(m, nn.GroupNorm) for m in modules)
