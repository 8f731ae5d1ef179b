"""The latent of a denoiser's call, one batch or a list of samples: its name, its size, and a perturbed copy."""

import torch
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.probe.capture import CallArguments, parameter_names
from patchpar.shard.transformer.probe.row_trace import disturbed

TABLE, IMAGE = 2, 4  # numbers of dims, of an image with batch or frames
WAY_OUT = "use plan cfg=2 or data=N, which do not split the tokens"


def name_of_latent(denoiser: nn.Module, arguments: CallArguments) -> str:
    """Return the first argument that holds an image or a video, of floats or of token ids. Raises UnsupportedModel.

    Rows of text ids before it are skipped; so are tables of floats, such as positions, if a later argument is an image.
    """
    most = dict.fromkeys(parameter_names(denoiser), 0)
    for latent in most:
        held = [x for name, x in arguments.tensors().items() if is_latent(name, latent)]
        most[latent] = max((x.ndim for x in held if x.ndim > (1 if x.is_floating_point() else 2)), default=0)
    found = [latent for latent, dims in most.items() if dims]
    if not found:
        raise UnsupportedModel(f"{type(denoiser).__name__} is called with nothing that can be denoised: {WAY_OUT}")
    if most[found[0]] == TABLE:
        return next((latent for latent in found if most[latent] >= IMAGE), found[0])
    return found[0]


def is_latent(name: str, latent: str) -> bool:
    """Whether an argument of that name is the latent, or one sample of it."""
    return name == latent or name.startswith(f"{latent}[")


def with_other_latent(arguments: CallArguments, latent: str, where: Tensor | None = None) -> CallArguments:
    """Return the same call with a perturbed latent: all of it, or where the bool mask `where` is true.

    `where` has the shape of a sample: [C, H, W], [C, F, H, W] or any shape that the denoiser takes.
    """

    def other(name: str, leaf: object) -> object:
        if not (is_latent(name, latent) and isinstance(leaf, Tensor)):
            return leaf
        changed = disturbed(leaf, 0, torch.arange(leaf.shape[0]))
        return changed if where is None else torch.where(where.to(leaf.device), changed, leaf)

    return arguments.map(other)


def latent_size(arguments: CallArguments, latent: str) -> int:
    """Return the number of elements of one sample of the latent. Raises UnsupportedModel."""
    found = _samples(arguments, latent)
    samples = found[latent].shape[0] if latent in found else len(found)
    return sum(leaf.numel() for leaf in found.values()) // samples


def latent_shape(arguments: CallArguments, latent: str) -> tuple[int, ...] | None:
    """Return the shape of one sample; None where they differ. Raises UnsupportedModel."""
    found = _samples(arguments, latent)
    shapes = {tuple(leaf.shape[1:] if name == latent else leaf.shape) for name, leaf in found.items()}
    return shapes.pop() if len(shapes) == 1 else None


def _samples(arguments: CallArguments, latent: str) -> dict[str, Tensor]:
    found = {name: leaf for name, leaf in arguments.tensors().items() if is_latent(name, latent)}
    if not found:
        raise UnsupportedModel(f"the first argument, {latent}, holds no tensor: {WAY_OUT}")
    return found
