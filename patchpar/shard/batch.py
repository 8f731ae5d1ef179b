"""The batch of a denoiser call: which arguments carry it, how to cut them into parts, and how to join the results.

    guidance in one call, 2 prompts     sample [n1 n2 | n1 n2]   text [u1 u2 | c1 c2]   timestep t   rotary (L, D)
    part 0 of 2                         sample [n1 n2]           text [u1 u2]           timestep t   rotary (L, D)

A tensor carries the batch if its first dim is the batch size, or, for a sample with frames and a tensor of three dims
or more, batch size x frames (the text of AnimateDiff, the residuals of a video ControlNet), or if the second of four is
(the text of HiDream, one for each layer). All parts get any other argument whole. `batch_arguments` finds exceptions.

Where the batch is a list, its texts differ in length. A network pads the shorter ones to the longest of its call, which
may be shorter in a part than in the whole:

    part 0    [image text .]  [image . .]         whole   [image text .]  [image . . .]  [image text text]
    part 1    [image text text]                           padded with zeros where the parts are joined
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.pytree import entries, tensors_in, with_tensors
from patchpar.errors import UnsupportedModel

SAMPLE_NAMES = ("sample", "hidden_states", "x")
IMAGE = 4  # dims of an image with its batch or frames
SHARED_NAMES = ("ip_adapter_masks",)
"""Arguments that never carry the batch, though a dim may equal it: masks are counted by adapters or images."""


def sample_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the sample of a denoiser call: a tensor, or a list of a tensor for each image. Raises UnsupportedModel."""
    if args:
        return args[0]
    for name in SAMPLE_NAMES:
        if name in kwargs:
            return kwargs[name]
    for value in kwargs.values():
        if _holds_images(value):
            return value
    raise UnsupportedModel(
        f"the denoiser was called with {', '.join(kwargs) or 'nothing'}: none of these is known to be its sample "
        f"({', '.join(SAMPLE_NAMES)}), and none is an image or a video. Run it without guidance split: cfg=1."
    )


def _holds_images(value: Any) -> bool:
    """Whether `value` is a batch of images or videos, or a list of them."""
    held = value if isinstance(value, list) else [value]
    return bool(held) and all(isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= IMAGE for x in held)


def count_branches(sample: Any) -> int:
    """Return how many times a batch repeats the same latents: 2 for [a b a b], 1 if it does not repeat.

    Guidance in one call repeats the latents for each branch; the channels, tokens or columns of a conditioning image,
    which come after those of the latents, may differ.
    """
    if isinstance(sample, list):
        sample = [each[-1] if isinstance(each, list) else each for each in sample]  # reference images come first
        if len({x.shape for x in sample}) > 1:
            return 1
        sample = torch.stack(sample)
    for branches in range(2, len(sample) + 1):
        if len(sample) % branches == 0 and _repeats(sample, branches):
            return branches
    return 1


def _repeats(sample: Tensor, branches: int) -> bool:
    """Whether the first channel, frame, token, row or column is the same in all branches, and not zero."""
    for dim in range(1, sample.ndim):
        first, *others = sample.select(dim, 0).chunk(branches)
        if first.any() and all(torch.equal(first, other) for other in others):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one denoiser call. `frames`: sizes that may be frames in a sample of five dims.

    `known`: the dim that carries the batch by path, for arguments where shapes are misleading; None for no dim. The
    path "" stands for a whole call that is not split.
    """

    size: int
    frames: tuple[int, ...] = ()
    by_item: bool = False  # lists have one entry for each image
    known: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def of(cls, sample: Any, known: Mapping[str, int | None] | None = None) -> "Batch":
        """Return the batch of a sample."""
        if isinstance(sample, list):
            return cls(len(sample), by_item=True, known=known or {})
        return cls(sample.shape[0], tuple(sample.shape[1:3]) if sample.ndim == 5 else (), known=known or {})

    def fits(self, size: int) -> bool:
        """Whether a dim of that size may be the batch, or batch size x frames."""
        return size in (self.size, *(self.size * count for count in self.frames))

    def carries(self, x: Tensor) -> bool:
        """Whether the first dim of `x`, of any shape, is the batch, or batch size x frames."""
        if x.ndim == 0:
            return False
        return x.shape[0] == self.size or (x.ndim > 2 and x.shape[0] in [self.size * count for count in self.frames])

    def _dim(self, x: Tensor) -> int | None:
        """Return the dim that carries the batch."""
        if self.carries(x):
            return 0
        return 1 if x.ndim == 4 and x.shape[1] == self.size > 1 else None

    def part(self, tree: Any, rank: int, parts: int, path: str = "") -> Any:
        """Return part `rank` of `parts` equal ones of the arguments (args, kwargs). `size` is a multiple of `parts`.

        An AsyncTensor of a whole batch may have the part that this rank computed, as `own_part`, and the shapes of the
        parts before padding, as `part_shapes`.
        """
        if isinstance(tree, Tensor):
            own_part: Tensor | None = getattr(tree, "own_part", None)
            if own_part is not None:
                return own_part
            dim = self.known[path] if path in self.known else self._dim(tree)
            shapes: Sequence[tuple[int, ...]] | None = getattr(tree, "part_shapes", None)
            part = tree if dim is None else tree.chunk(parts, dim)[rank]
            return part if dim is None or shapes is None else cut_to(part, shapes[rank])
        if isinstance(tree, list) and self._is_per_item(tree):
            per_part = self.size // parts
            return tree[rank * per_part : (rank + 1) * per_part]
        if isinstance(tree, dict) and type(tree) is dict:
            return {
                key: value if key in SHARED_NAMES else self.part(value, rank, parts, f"{path}.{key}")
                for key, value in tree.items()
            }
        if type(tree) in (list, tuple):
            return type(tree)(self.part(item, rank, parts, f"{path}[{at}]") for at, item in enumerate(tree))
        return tree

    def at_rows(self, tree: Any, rows: Sequence[int], factors: Sequence[float], path: str = "") -> Any:
        """Return the arguments (args, kwargs) with these rows of the batch, in this order, also several times.

        Images and texts are multiplied by the factors, one for each of `rows`; timesteps, sizes and pooled texts, which
        have fewer dims, are not.
        """
        if isinstance(tree, Tensor):
            dim = self.known[path] if path in self.known else self._dim(tree)
            return tree if dim is None else self._tensor_at(tree, dim, rows, factors)
        if isinstance(tree, list) and self._is_per_item(tree):
            return [_scaled(tree[row], factor) for row, factor in zip(rows, factors, strict=True)]
        if isinstance(tree, dict) and type(tree) is dict:
            return {
                key: value if key in SHARED_NAMES else self.at_rows(value, rows, factors, f"{path}.{key}")
                for key, value in tree.items()
            }
        if type(tree) in (list, tuple):
            return type(tree)(self.at_rows(item, rows, factors, f"{path}[{at}]") for at, item in enumerate(tree))
        return tree

    def _tensor_at(self, x: Tensor, dim: int, rows: Sequence[int], factors: Sequence[float]) -> Tensor:
        each = x.shape[dim] // self.size
        index = [row * each + at for row in rows for at in range(each)]
        taken = x.index_select(dim, torch.tensor(index, device=x.device))
        if x.ndim < 3 or not x.is_floating_point():
            return taken
        scales = torch.tensor(factors, dtype=x.dtype, device=x.device).repeat_interleave(each)
        return taken * scales.view(-1, *[1] * (x.ndim - dim - 1))

    def _is_per_item(self, items: list[Any]) -> bool:
        if len(items) != self.size or self.by_item:
            return len(items) == self.size
        tensors_carry = all(isinstance(item, Tensor) and self.carries(item) for item in items)
        return not tensors_carry and not any(isinstance(item, (bool, int, float)) for item in items)

    def join(self, trees: Sequence[Any]) -> Any:
        """Return the result for the whole batch from those of its parts, in order. Raises UnsupportedModel."""
        first = trees[0]
        if isinstance(first, Tensor):
            parts = [filled_up(x, largest_of([each.shape for each in trees])) for x in trees] if self.by_item else trees
            whole = torch.cat(list(parts))
            if not self.carries(whole):
                raise UnsupportedModel(
                    f"the denoiser returned a tensor of shape {tuple(first.shape)} for {self.size // len(trees)} of a "
                    f"batch of {self.size}: its first dim is not the batch. Run it without guidance split: cfg=1."
                )
            return whole
        if isinstance(first, dict):
            held = [entries(tree) for tree in trees]
            joined = {key: self.join([values[key] for values in held]) for key in held[0]}
            return joined if type(first) is dict else type(first)(**joined)
        if isinstance(first, list) and self.by_item and len(first) * len(trees) == self.size:
            return [item for tree in trees for item in tree]
        if isinstance(first, (list, tuple)):
            return type(first)([self.join(items) for items in zip(*trees, strict=True)])
        return first

    def as_joined(self, whole: Any, trees: Sequence[Any]) -> Any:
        """Return `whole` with zeros where `join` pads parts further than the network did."""
        of_parts, tensors = [tensors_in(tree) for tree in trees], tensors_in(whole)
        if not self.by_item or any(len(each) != len(tensors) for each in of_parts):  # one tensor for each item
            return whole
        cut = [
            [cut_to(chunk, part.shape) for chunk, part in zip(x.chunk(len(trees)), parts, strict=True)]
            for x, parts in zip(tensors, zip(*of_parts, strict=True), strict=True)
        ]
        return self.join([with_tensors(whole, parts) for parts in zip(*cut, strict=True)])


def _scaled(item: Any, factor: float) -> Any:
    """Return an item of a list, an image [C, ...] or text [tokens, C], multiplied; others as they are."""
    is_scaled = isinstance(item, Tensor) and item.ndim > 1 and item.is_floating_point()
    return factor * item if is_scaled and factor != 1 else item


def largest_of(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the largest size of each dim."""
    return tuple(map(max, zip(*shapes, strict=True)))


def filled_up(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x` [B, ...] padded with zeros at the end of each dim but the first, to [B, *shape[1:]]."""
    if x.shape[1:] == torch.Size(shape[1:]):
        return x
    filled = x.new_zeros((len(x), *shape[1:]))
    filled[tuple(slice(size) for size in x.shape)] = x
    return filled


def cut_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x`, of any shape, cut to `shape` at the end of each dim: the inverse of `filled_up`."""
    return x[tuple(slice(size) for size in shape)]
