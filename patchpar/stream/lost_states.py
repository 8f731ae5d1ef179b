"""Which states of a stream were lost with ranks that have died, before blocks that have not come out yet."""

from patchpar.stream.messages import LostStage

DECODER = -1
"""The key of the decoder beside denoising steps."""


class LostStates:
    """Losses by block. A later loss of a state replaces those before blocks that it will compute again."""

    def __init__(self) -> None:
        self._refills: dict[int, dict[int, bool]] = {}  # block: {step: whether it is a decoder that is refilled}

    def add(self, lost: LostStage) -> None:
        """Record a loss."""
        keys = [*range(lost.start, lost.stop), *([DECODER] if lost.decodes else [])]
        for block, known in self._refills.items():
            if block > lost.block:
                for key in keys:
                    known.pop(key, None)
        self._refills.setdefault(lost.block, {}).update(dict.fromkeys(keys, lost.refills))

    def pop(self, block: int) -> tuple[LostStage, ...]:
        """Remove and return what was lost before a block, one entry for each step and for the decoder."""
        found = sorted(self._refills.pop(block, {}).items())
        return tuple(
            LostStage(block=block, start=0, stop=0, decodes=True, refills=refills)
            if key == DECODER
            else LostStage(block=block, start=key, stop=key + 1)
            for key, refills in found
        )
