"""Install exchange points in a denoiser, remove them exactly, and verify the split forward.

install    a hook on every discovered module; types, names and state dict keys do not change
restore    remove every hook; outputs are bit-equal to the untouched denoiser
verify     compare the split forward with the plain one, at two sizes, on all ranks
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.attention.attention_memory import AttentionMemory, reuses_buffers
from patchpar.shard.group_offload import group_here, is_offloaded
from patchpar.shard.hooks import HookSet
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.precision import full_precision
from patchpar.shard.processor_call import looks_up_signatures
from patchpar.shard.sdpa import AttentionDispatched
from patchpar.shard.unet.attention_hook import AttentionHook, ContextHook, refusal_of_past
from patchpar.shard.unet.compiled_blocks import CompiledBlocks
from patchpar.shard.unet.discover import ExchangeSites, NormSite
from patchpar.shard.unet.ip_adapter_masks import MaskHook, takes_masks
from patchpar.shard.unet.layer_hooks import ConvFed, ConvHook, NormHook
from patchpar.shard.unet.layers import stencil_of
from patchpar.shard.unet.spatial_arguments import with_sample_size
from patchpar.shard.unet.whole_maps import FourierHook, PoolingHook
from patchpar.shard.unsupported_model import is_of_the_split
from patchpar.shard.verification import Call, Comparison, relative_error, rounding_limit

HOOK = "patchpar_seam"


class UNetSharder:
    """A denoiser with exchange points. `restore()` leaves it as it was."""

    def __init__(self, denoiser: nn.Module, sites: ExchangeSites, patch: LocalPatch) -> None:
        self._modules: dict[str, Any] = dict(denoiser.named_modules())
        self._hooks = HookSet()
        self.patch = patch
        try:
            self._hook_all(sites)
        except BaseException:
            self.restore()  # a refused denoiser is left as it was
            raise

    def run(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the denoiser's `forward` for this rank's bands."""
        patch = self.patch
        # Not with gradients, which need what attention has been given.
        reuses = not torch.is_grad_enabled() and reuses_buffers((patch.comm, patch.axis))
        patch.memory = AttentionMemory() if reuses else None
        try:
            # A graph of torch.compile holds as long as torch's functions are the same.
            with nullcontext() if self._compiled.paths else AttentionDispatched():
                return forward(*args, **kwargs)
        finally:
            patch.memory = None

    def _hook_all(self, sites: ExchangeSites) -> None:
        patch = self.patch
        self._compiled = CompiledBlocks(self._modules)
        self._compiled.refuse_others(sites, self._modules)
        self._compiled.install(self._hooks, self._modules, sites, patch)
        trailing = {site.path: site.trailing for site in sites.convs}
        for norm in sites.norms:
            self._hook(norm.path, NormHook(patch, norm.path, self._fed_by(norm, trailing)))
        for conv in sites.convs:
            if self._reaches(conv.path):
                hook = ConvHook(patch, conv.path, reads_sample=conv.reads_sample, trailing=conv.trailing)
                self._hook(conv.path, hook)
        self._hook_attention(sites)
        for path in sites.transforms:
            self._hook(path, FourierHook(patch, path), "patchpar_fourier")
        for path in sites.pools:
            self._hook(path, PoolingHook(patch, path))

    def _hook_attention(self, sites: ExchangeSites) -> None:
        for path in sites.attentions:
            own_kernel = path in sites.own_kernel
            if own_kernel and self.patch.policy.context is not None:
                raise refusal_of_past(path, self._modules[path], self.patch.policy.name)
            if self._compiled.hold(path):
                continue
            self._hook(path, AttentionHook(self.patch, path, own_kernel=own_kernel, elsewhere=path in sites.elsewhere))
        for path, module in self._modules.items():
            if path in sites.attentions:
                continue
            if takes_masks(module):
                self._hook(path, MaskHook(self.patch))
            elif looks_up_signatures(module) and not self._compiled.hold(path):
                self._hook(path, ContextHook(self.patch))

    def _fed_by(self, norm: NormSite, trailing: dict[str, int]) -> ConvFed | None:
        stencils = {
            conv: stencil_of(self._modules[conv], self.patch.dim)
            for conv in norm.convs
            if self._reaches(conv) and not trailing.get(conv)
        }
        if not stencils:
            return None
        stencil = next(iter(stencils.values()))
        convs = tuple(conv for conv, own in stencils.items() if own == stencil)
        return ConvFed(convs, stencil.before, stencil.after, tuple(self._modules[path] for path in norm.activations))

    def _reaches(self, path: str) -> bool:
        conv = self._modules[path]
        if conv.kernel_size[self.patch.dim] == 1:
            return False
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise UnsupportedModel(
                f"{path} pads with {conv.padding_mode!r} ({conv.padding!r}), but bands need a number of zeros: use cfg"
            )
        return True

    def _hook(self, path: str, hook: ModelHook, name: str = HOOK) -> None:
        module = self._modules[path]
        if is_offloaded(module):  # its weights come before its own forward, which does not run
            hook.new_forward = partial(_with_its_group, hook.new_forward)
        self._hooks.install(module, hook, name)

    def restore(self) -> None:
        """Remove every exchange point. Idempotent."""
        self._hooks.close()


def _with_its_group(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with group_here(module):
        return forward(module, *args, **kwargs)


Size = tuple[int, int]


def verification_sizes(total_stride: int, group_ranks: int) -> tuple[tuple[Size, ...], ...]:
    """Return small latent sizes to verify at, alternatives for even and for uneven bands; the first that fits is used.

    Uneven bands with a remainder of half a unit come first, but not every denoiser takes such a size.
    """
    even = total_stride * group_ranks
    uneven = (even + total_stride, even + total_stride)
    return ((even, even),), ((uneven[0] + total_stride // 2, uneven[1]), uneven)


def compared_at_two_sizes(
    split: Callable[..., Any],
    plain: Callable[..., Any],
    call: Call,
    sites: ExchangeSites,
    patch: LocalPatch,
    compared: Callable[[Any, Any], Comparison],
) -> Iterator[list[Comparison]]:
    """Yield comparisons of `split` with `plain` on this rank, on inputs like `call`'s at the `verification_sizes`.

    `compared` takes two outputs.
    """
    found = []
    for seed, sizes in enumerate(verification_sizes(sites.total_stride, patch.axis.size)):
        turned = sizes if patch.dim == -2 else tuple((short, long) for long, short in sizes)
        with torch.no_grad(), full_precision():
            size, want = plain_at(turned, plain, call, sites, seed)
            args, kwargs = with_sample_size(*call, size, seed=seed, beside=sites.beside)
            found.append(compared(split(*args, **kwargs), want))
    yield found


def compared_predictions(got: Any, want: Any) -> Comparison:
    """Return the comparison of the predictions in two outputs."""
    prediction = first_tensor(want)
    return Comparison(relative_error(first_tensor(got), prediction), rounding_limit([prediction]))


def plain_at(
    sizes: Sequence[Size], plain: Callable[..., Any], call: Call, known: ExchangeSites, seed: int
) -> tuple[Size, Any]:
    """Return the first of `sizes` that the plain denoiser takes, and its output there."""
    for size in sizes:
        args, kwargs = with_sample_size(*call, size, seed=seed, beside=known.beside)
        try:
            output = plain(*args, **kwargs)
        except Exception as error:  # skip connections of different sizes: this denoiser takes whole multiples only
            if size == sizes[-1] or not is_of_the_split(error):
                raise
            continue
        if tuple(first_tensor(output).shape[-2:]) == size:  # or it has cut the remainder
            break
    return size, output


def first_tensor(output: Any) -> Tensor:
    """Return the prediction [B, C, H, W] or [B, C, F, H, W] of a denoiser call from a tensor, tuple or output class.

    Of a network that returns lists of maps it is the first map.
    """
    return output if isinstance(output, Tensor) else first_tensor(output[0])
