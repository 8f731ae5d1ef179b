"""Prove a cut in one process: run the block as each rank would, and compare it with the whole one.

What a rank gets from a sum over ranks is known from the whole block: the sum. So each rank runs alone, its own terms
are noted, and afterwards all terms must add up to what was known. Nothing is exchanged, so nothing can hang.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.hooks import HookSet
from patchpar.shard.precision import wide
from patchpar.shard.tensor.cut import CutBlock
from patchpar.shard.tensor.feature_plan import BlockCut
from patchpar.shard.tensor.norms import sums_of
from patchpar.shard.transformer.probe.capture import CapturedBlock
from patchpar.shard.transformer.probe.observe_block import output_tensors
from patchpar.shard.verification import relative_error

Calls = dict[str, list[Tensor]]  # by path
LIMIT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error that another order of a sum explains in one block."""


class BlockProof:
    """Proves cuts of one kind of block on the call that it was captured with."""

    def __init__(self, block: CapturedBlock, size: int) -> None:
        self.block, self.size = block, size
        self._dtypes: dict[str, torch.dtype] = {}  # of what norms read, by path: of their sums in fp64 it is the limit

    def check(self, cut: BlockCut) -> None:
        """Raise UnsupportedModel, or what the block raises, where the cut is not right on every rank."""
        known: Calls = defaultdict(list)
        wanted, terms = self._whole(cut, known), dict[tuple[str, int], Tensor]()
        for rank in range(self.size):
            _check_alike(self._of_rank(cut, rank, known, terms), wanted, f"the output on rank {rank}")
        for path, calls in known.items():
            for number, x in enumerate(calls):
                _check_alike({0: terms[path, number]}, {0: x}, f"the sum at {path}", self._dtypes.get(path))

    def _whole(self, cut: BlockCut, known: Calls) -> dict[int, Tensor]:
        """Return the outputs of the whole block; note what is added up at each path."""

        def note_row(path: str, module: Any, args: Any, output: Tensor) -> None:
            known[path].append(output.clone() if module.bias is None else output - module.bias)

        def note_norm(path: str, module: nn.Module, args: Any, output: Tensor) -> None:
            known[path].append(sums_of(module, args[0]))
            self._dtypes[path] = wide(args[0][:0]).dtype

        with HookSet() as hooks:
            for each in cut.rows:
                hooks.after(self.block.module.get_submodule(each.path), partial(note_row, each.path))
            for each in cut.norms:
                hooks.after(self.block.module.get_submodule(each.path), partial(note_norm, each.path))
            return self._outputs()

    def _of_rank(
        self, cut: BlockCut, rank: int, known: Calls, terms: dict[tuple[str, int], Tensor]
    ) -> dict[int, Tensor]:
        """Return the outputs of the block as `rank` computes it; add its terms to `terms`."""
        calls: dict[str, int] = defaultdict(int)

        def add_up(path: str, own: Tensor) -> Tensor:
            number = calls[path]
            calls[path] += 1
            if number >= len(known[path]):
                raise UnsupportedModel(f"{path} runs more often than in the whole block")
            before = terms.get((path, number))
            terms[path, number] = wide(own) if before is None else before + wide(own)
            return known[path][number].to(own.dtype, copy=True)

        part = CutBlock(self.block.module, cut, rank, add_up)
        try:
            found = self._outputs()
        finally:
            part.undo()
        if any(calls[path] != len(of_whole) for path, of_whole in known.items()):
            raise UnsupportedModel("it runs other parts than the whole block")
        return found

    def _outputs(self) -> dict[int, Tensor]:
        with torch.no_grad():
            return output_tensors(self.block.arguments.passed_to(self.block.module))


def _check_alike(
    found: dict[int, Tensor], wanted: dict[int, Tensor], what: str, computed: torch.dtype | None = None
) -> None:
    """Raise UnsupportedModel where tensors of any shape differ by more than rounding, in their dtype or another."""
    for number, x in wanted.items():
        if found[number].shape != x.shape:
            raise UnsupportedModel(f"{what} has the shape {list(found[number].shape)}, not {list(x.shape)}")
        limit = LIMIT.get(computed or x.dtype, 0.0)
        if x.is_floating_point() and (error := relative_error(found[number], x)) > limit:
            raise UnsupportedModel(f"{what} differs by {error:.0e}")
