"""What a rank remembers of the pieces of an image: keys and values at each attention, and tensors that it joins.

    pieces before this one     of this step
    this piece                 fresh
    pieces after it            of the last step, extrapolated from the last two, and corrected

The correction costs no message. How the keys and values of this piece have changed since the last step is known here:
the fit of the new ones to the old ones is applied to the pieces after it. Most of the change is common to all tokens,
see `patchpar.shard.stale.correction`.

Shape letters: T tokens of all pieces, common ones first; l of one piece; B batch, N heads, D head width.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.plan.exchange_policy import StaleKV
from patchpar.shard.kernels.correct_tokens import correct_run
from patchpar.shard.kernels.write_tokens import write_tokens
from patchpar.shard.stale.correction import OwnPast
from patchpar.shard.stale.token_slots import TokenSlots
from patchpar.shard.stale.workspace import Workspace


class PieceMemory:
    """Keys and values of all pieces at one attention: [T, 2, B, N, D], in the order of `slots`.

    `image`: where the image's tokens begin and how many they are in each piece; the others are text. `like`: a tensor
    of their dtype on their device. `workspace`: memory that attention reads, of no use after it.
    """

    def __init__(
        self,
        slots: TokenSlots,
        image: Sequence[tuple[int, int]],
        token: tuple[int, ...],
        options: StaleKV,
        like: Tensor,
        workspace: Workspace,
    ) -> None:
        self.slots, self._image, self._token, self._options = slots, tuple(image), token, options
        self._workspace = workspace
        self._newest = like.new_empty(slots.total, *token)
        self._previous = like.new_empty(slots.total, *token) if options.extrapolated else None
        self._pasts = [OwnPast(options.correction, extrapolated=options.extrapolated) for _ in slots.counts]

    def remember(self, key_BTND: Tensor, value_BTND: Tensor, *, continues: bool) -> None:
        """Store all tokens of an exact step. `continues`: the step before belongs to the same image."""
        if continues:
            self._step_back(0, self.slots.total)
        write_tokens(self._newest, key_BTND, value_BTND, self.slots.common, self.slots.common, None)
        if not continues:
            self._step_back(0, self.slots.total)
        for piece, past in enumerate(self._pasts):
            past.remember(self._tokens_of(piece), continues=continues)

    def write(self, piece: int, key_BlND: Tensor, value_BlND: Tensor, ratio: Tensor) -> Tensor:
        """Store a piece's tokens of this step, common ones first, and return [T, 2, B, N, D] for its attention.

        `ratio`: length of this step over that of the last, a scalar in fp32. Call it for one piece after the other.
        """
        slots, options = self.slots, self._options
        start, count = slots.starts[piece], slots.counts[piece]
        self._step_back(start, count)
        write_tokens(self._newest, key_BlND, value_BlND, start, slots.common, None)
        corrects = options.correction != "none"
        fit = self._pasts[piece].fit(self._tokens_of(piece), ratio) if corrects else None
        after = start + count
        if not (corrects or options.extrapolated) or after == slots.total:
            return self._newest
        attended = self._workspace.take((slots.total, *self._token), self._newest)
        attended[:after].copy_(self._newest[:after])
        previous = None if self._previous is None else self._previous[None, after:]
        fits = None if fit is None else fit.unsqueeze(0)
        correct_run(attended[None, after:], self._newest[None, after:], previous, fits, ratio)
        return attended

    def _tokens_of(self, piece: int) -> Tensor:
        """Return a piece's tokens [l, 2, B, N, D] of the image."""
        start, count = self._image[piece]
        return self._newest.narrow(0, self.slots.starts[piece] + start, count)

    def _step_back(self, start: int, count: int) -> None:
        if self._previous is not None:
            self._previous.narrow(0, start, count).copy_(self._newest.narrow(0, start, count))

    def tensors(self) -> Iterator[Tensor]:
        """Yield every stored tensor, of any shape."""
        yield self._newest
        if self._previous is not None:
            yield self._previous
        for past in self._pasts:
            yield from past.tensors()

    def arriving(self) -> Iterator[Tensor]:
        """Yield no tensors, of any shape: no message brings what is stored here."""
        yield from ()


class RememberedParts:
    """The parts, by piece, of tensors that are joined at one point of the model: what each piece last had there."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts: dict[tuple[int, int], list[Tensor]] = {}  # by tensor and piece: the part of each run

    def remember(self, tensor: int, piece: int, parts: Sequence[Tensor]) -> None:
        """Store the parts of a piece, one of any shape for each run of its tokens."""
        self._parts[tensor, piece] = [part.clone() for part in parts]

    def of(self, tensor: int, piece: int) -> list[Tensor]:
        """Return the parts of a piece, of any shape. Raises UnsupportedModel where they are not known."""
        found = self._parts.get((tensor, piece))
        if found is None:
            raise UnsupportedModel(
                f"{self._where}: the tokens of all pieces are joined there, but not in the exact step before: use "
                "strategy=exact"
            )
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Yield every stored tensor, of any shape."""
        for parts in self._parts.values():
            yield from parts

    def arriving(self) -> Iterator[Tensor]:
        """Yield no tensors, of any shape: no message brings what is stored here."""
        yield from ()
