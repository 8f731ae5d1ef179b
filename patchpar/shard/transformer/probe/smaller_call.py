"""The same call of a transformer with fewer tokens, for devices on which a plain call of its size does not fit.

an image or a video   the first rows and columns of each frame; arguments as large as the latent are cut alike, and maps
                      at the levels of a UNet, which ControlNets and adapters give
a list of tokens      the first of them, in all arguments that have as many; these are whole rows of an image
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.latent import is_latent, name_of_latent
from patchpar.shard.verification import Call

IMAGE_SIDES = (16, 32, 64)
COARSER = (2, 4, 8, 16)
FEWEST_TOKENS = 64


def smaller_calls_of(network: nn.Module, call: Call) -> Iterator[CallArguments]:
    """Return what `smaller_calls` does for a call of a network, which tells its latent."""
    arguments = CallArguments.of(network, *call)
    return smaller_calls(arguments, name_of_latent(network, arguments))


def smaller_calls(arguments: CallArguments, latent: str) -> Iterator[CallArguments]:
    """Yield calls with fewer tokens, the largest first. Not every model takes them: other arguments may have sizes."""
    samples = [x for name, x in arguments.tensors().items() if is_latent(name, latent) and x.is_floating_point()]
    if not samples:
        return
    if samples[0].ndim <= 3 and latent in arguments.tensors():
        yield from _with_first_tokens(arguments, samples[0].shape[-2])
        return
    for side in reversed(IMAGE_SIDES):
        if any(max(x.shape[-2:]) > side for x in samples):
            yield arguments.map(partial(_cut_image, samples, side))


def _cut_image(samples: list[Tensor], side: int, name: str, leaf: Any) -> Any:
    """Cut a tensor [..., H, W] that is as large as the latent, or a map of it at a coarser level of a UNet."""
    if not isinstance(leaf, Tensor) or leaf.ndim < 3:
        return leaf
    for factor in (1, *COARSER) if leaf.ndim > 3 else (1,):
        if any(leaf.shape[-2:] == _coarser(x.shape[-2:], factor) for x in samples):
            rows, columns = _coarser((side, side), factor)
            return leaf[..., :rows, :columns].contiguous()
    return leaf


def _coarser(size: Sequence[int], factor: int) -> tuple[int, ...]:
    """Return the height and width after convolutions with such strides."""
    return tuple(-(-each // factor) for each in size)


def _with_first_tokens(arguments: CallArguments, tokens: int) -> Iterator[CallArguments]:
    size = tokens
    while size % 2 == 0 and size // 2 >= FEWEST_TOKENS:
        size //= 2
        yield arguments.map(partial(_first_tokens, tokens, size))


def _first_tokens(tokens: int, size: int, name: str, leaf: Any) -> Any:
    """Cut a tensor with a dim of `tokens` rows to the first `size` of them."""
    if not isinstance(leaf, Tensor) or tokens not in leaf.shape:
        return leaf
    return leaf.narrow(leaf.shape.index(tokens), 0, size).contiguous()
