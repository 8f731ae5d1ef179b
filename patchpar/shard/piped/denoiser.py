"""A transformer whose tokens are computed in pieces: each attends to what was last known of the pieces after it.

    exact step     all tokens in one call, whose keys and values are remembered
    other steps    a call for each piece, one after the other: pieces before it are of this step, after it of the last

On one rank this is slower than a plain call. It is what stages of PipeFusion (arXiv:2405.14430) compute together, each
its own blocks: while one computes a piece, the next one computes the piece before.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from patchpar.comm.pytree import with_own_lists
from patchpar.errors import UnsupportedModel
from patchpar.shard.piped.latent_bands import cut_for_bands
from patchpar.shard.piped.piece_split import PieceSplit, piece_axis
from patchpar.shard.stale.cache import StaleCache
from patchpar.shard.stale.state import StaleState
from patchpar.shard.transformer.attention_backend import BackendKernel
from patchpar.shard.transformer.denoiser import TokenDenoiser
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.unsupported_model import in_one_line, is_of_the_split
from patchpar.shard.verification import Call, Forward

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False, kw_only=True)
class PipedDenoiser(TokenDenoiser):
    """A denoiser that computes its tokens in `pieces` after the exact steps. Every rank passes and gets whole tensors.

    `text_once`: text is computed with the first piece only, where it is a second run of tokens, and where the network
    works without any text in other pieces; else with every piece. The `mesh` is that of
    the ranks that call it together. `exchange` "off": every piece attends to its own tokens alone, a negative control.
    """

    pieces: int = 4
    text_once: bool = True

    def _split(self, kernel: BackendKernel | None = None, *, wrong: bool | None = None) -> PieceSplit:
        """Return the split of a whole call."""
        patch, alone = self.patch, self.exchange == "off" if wrong is None else wrong
        mode = None if alone else _by_memory
        cut, axis = cut_for_bands(self.plan), piece_axis(0, 1)
        return PieceSplit(patch.comm, axis, mode, patch, kernel, cut, text=self.text_once, pieces=self.pieces)

    def _check(self, forward: Forward, call: Call, *, known: bool) -> None:
        assert self.plan is not None
        self._refuse_old_values(self.plan)  # a comparison would fail in other words
        try:
            self._check_pieces(forward, call, known=known)
        except Exception as error:  # the same on all ranks
            if not self.text_once or not is_of_the_split(error):
                raise
            log.info("%s: text is computed with every piece (%s)", self.plan.denoiser, in_one_line(error))
            self.text_once = False
            self._take_up(self.plan)
            self._check_pieces(forward, call, known=known)

    def _check_pieces(self, forward: Forward, call: Call, *, known: bool) -> None:
        super()._check(forward, call, known=known)
        if self.verifications is None and not known:
            self._split_call(forward, *call[0], **call[1])

    def _refuse_old_values(self, plan: TokenPlan) -> None:
        """Raise UnsupportedModel for a model whose tokens meet in other ways than attention."""
        super()._refuse_old_values(plan)
        parts = sorted({part.path for block in plan.blocks for part in block.replicated})
        if parts:
            self._take_out()
            raise UnsupportedModel(
                f"{plan.denoiser} has parts that need all tokens at once ({', '.join(parts)}), which pieces do not "
                "have: use strategy=exact"
            )

    def _facts(self, call: Call) -> dict[str, Any]:
        return super()._facts(call) | {"pieces": self.pieces, "text once": self.text_once}

    def _with_stale_state(self, history: StaleState, signature: Any, forward: Forward, call: Call) -> Any:
        """Run a whole call in an exact step, else one for each piece."""
        args, kwargs = call
        self._look_back(history, signature, call)
        if self.patch.fresh:
            output = self._whole(forward, *args, **kwargs)
        else:
            output = self._in_pieces(forward, *args, **kwargs)
        history.cache.end()
        return output

    def _whole(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        return self._whole_here(forward, *args, **kwargs)

    def _whole_here(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        assert self._shard is not None
        return self._shard.denoise(forward, *with_own_lists(args), **with_own_lists(kwargs))

    def _in_pieces(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        return self._pieces_here(forward, *args, **kwargs)

    def _pieces_here(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last piece: there the tokens of all pieces are of this call."""
        output = None
        for piece in range(self.pieces):
            output = self._piece(piece, forward, *args, **kwargs)
        return output

    def _piece(self, piece: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        shard, cache = self._shard, self.patch.cache
        assert shard is not None
        assert cache is not None
        cache.rewind()
        whole = shard.split
        shard.split = replace(whole, axis=piece_axis(piece, self.pieces))
        try:
            return shard.denoise(forward, *with_own_lists(args), **with_own_lists(kwargs))
        finally:
            shard.split = whole

    def _split_call(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call as a whole, and again in pieces: nothing has changed meanwhile, so that the output is the same."""
        with self._other_memory() as cache:
            cache.begin(0, 0, None)
            self._whole_here(forward, *args, **kwargs)
            cache.begin(0, 1, None)
            return self._pieces_here(forward, *args, **kwargs)

    @contextmanager
    def _other_memory(self) -> Iterator[StaleCache]:
        """Context in which pieces remember nothing of the image that is generated."""
        patch = self.patch
        before = patch.cache, patch.step_ratio
        patch.cache = StaleCache(patch.comm, patch.policy.bucket)
        patch.step_ratio = torch.zeros((), device=patch.comm.transport.device)
        try:
            yield patch.cache
        finally:
            patch.cache, patch.step_ratio = before


def _by_memory(*_: Any) -> Any:
    """Stands for a mode of attention: pieces do not exchange keys."""
    raise NotImplementedError
