"""What a scheduler's step returns, an output or a tuple: the latents it came to, and the same with others."""

from typing import Any

from torch import Tensor


def sample_in(result: Any) -> Tensor:
    """The latents."""
    sample: Tensor = result[0] if isinstance(result, tuple) else result.prev_sample
    return sample


def with_sample(result: Any, sample: Tensor) -> Any:
    """The same with other latents."""
    if isinstance(result, tuple):
        return (sample, *result[1:])
    result.prev_sample = sample
    return result
