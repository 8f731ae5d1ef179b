"""The latents in the result of a scheduler's step, which is an output class or a tuple."""

from typing import Any

from torch import Tensor


def sample_in(result: Any) -> Tensor:
    """Return the latents in the result of a step, of any shape."""
    sample: Tensor = result[0] if isinstance(result, tuple) else result.prev_sample
    return sample


def with_sample(result: Any, sample: Tensor) -> Any:
    """Return the result with the latents `sample`, of any shape, in their place."""
    if isinstance(result, tuple):
        return (sample, *result[1:])
    result.prev_sample = sample
    return result
