"""What the memory of a rank consists of: the terms of the formula of plans, and their text."""

from dataclasses import dataclass, fields

from patchpar.plan.byte_sizes import readable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTerms:
    """Bytes of weights on the device of a rank.

    `whole`: of networks that are not divided, and outside of blocks; `blocks`: its part of divided ones; `resident`:
    of blocks that stay whole; `slots`: of the buffers in which divided blocks run.
    """

    whole: int = 0
    blocks: int = 0
    resident: int = 0
    slots: int = 0

    @property
    def total(self) -> int:
        """Bytes."""
        return self.whole + self.blocks + self.resident + self.slots

    def __add__(self, other: "WeightTerms") -> "WeightTerms":
        """Return those of two networks."""
        names = [each.name for each in fields(self)]
        return WeightTerms(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerms:
    """Bytes on the device of the first rank of an image.

    Of `encode`, `denoise` and `decode`, activations of the three phases, the most counts; all zero: not known. `kept`:
    keys and values that are kept from step to step.
    """

    weights: WeightTerms
    encode: int = 0
    denoise: int = 0
    decode: int = 0
    kept: int = 0

    @property
    def total(self) -> int:
        """Bytes."""
        return self.weights.total + max(self.encode, self.denoise, self.decode) + self.kept

    def __str__(self) -> str:
        """Return the sum, term by term, for refusals."""
        weights = self.weights
        named = [
            (weights.whole, "weights"),
            (weights.blocks, "its part of the blocks"),
            (weights.resident, "resident blocks"),
            (weights.slots, "slots"),
        ]
        texts = [f"{readable_bytes(size)} {what}" for size, what in named if size]
        phases = {"encoding": self.encode, "denoising": self.denoise, "VAE": self.decode}
        if any(phases.values()):
            each = ", ".join(f"{what} {readable_bytes(size)}" for what, size in phases.items())
            texts.append(f"{readable_bytes(max(phases.values()))} activations ({each})")
        else:
            texts.append("activations, which are not known here")
        if self.kept:
            texts.append(f"{readable_bytes(self.kept)} keys and values")
        return " + ".join(texts)
