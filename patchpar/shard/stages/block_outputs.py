"""Outputs of blocks: what a block returned, as tensors to send, and what stands for it where the block does not run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchpar.comm.pytree import leaves, tensors_in, with_tensors
from patchpar.comm.transport import TensorSpec

PLAIN = (bool, int, float, str, type(None))


class TensorForm(NamedTuple):
    """Shape, dtype and strides of a tensor whose elements lie side by side."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutputStructure:
    """The structure of an output, with empty tensors in place of its own, and the forms of these."""

    tree: Any
    tensors: tuple[TensorForm, ...]

    @classmethod
    def of(cls, output: Any) -> "OutputStructure | None":
        """Return the form of an output; None if it holds more than tensors, numbers and texts."""
        if not all(type(leaf) in (Tensor, *PLAIN) for leaf in leaves(output)):
            return None
        kept = [torch.empty_like(x, device="meta") for x in tensors_in(output)]
        forms = tuple(TensorForm(tuple(x.shape), x.dtype, x.stride()) for x in kept)
        return cls(with_tensors(output, [torch.empty(0)] * len(kept)), forms)

    def fits(self, output: Any) -> bool:
        """Whether an output has this form, whatever its strides."""
        return [TensorSpec.of(x) for x in tensors_in(output)] == [(x.shape, x.dtype) for x in self.tensors]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """What is sent of such an output."""
        return tuple(TensorSpec((torch.Size(x.shape).numel(),), x.dtype) for x in self.tensors)

    def sent(self, output: Any) -> tuple[Tensor, ...]:
        """Return copies of an output's tensors, each as [elements] in the order of this form's strides."""
        copies = [
            torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=x.device).copy_(x.detach())
            for x, form in zip(tensors_in(output), self.tensors, strict=True)
        ]
        return tuple(x.as_strided((x.numel(),), (1,)) for x in copies)

    def received(self, tensors: Sequence[Tensor]) -> Any:
        """Return the output of which `tensors` [elements] were sent."""
        found = [x.as_strided(form.shape, form.stride) for x, form in zip(tensors, self.tensors, strict=True)]
        return with_tensors(self.tree, found)


class Placeholders:
    """Outputs of blocks that do not run: NaN, so that nothing that depends on one goes unnoticed; integers are zero.

    One tensor for each form, whatever a network writes into it. `refill` makes all of them NaN again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[TensorForm, Tensor] = {}

    def output(self, form: OutputStructure) -> Any:
        """Return an output of that form."""
        return with_tensors(form.tree, [self._tensor(each) for each in form.tensors])

    def refill(self) -> None:
        """Forget what a network has written into placeholders, and free those that are in use no more."""
        self._tensors.clear()

    def _tensor(self, form: TensorForm) -> Tensor:
        if form not in self._tensors:
            with torch.inference_mode(mode=False):
                x = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=self._device)
                self._tensors[form] = x.fill_(torch.nan if form.dtype.is_floating_point else 0)
        return self._tensors[form]
