"""Random generators among the arguments of a call. Does not import torch, so that callers need not either."""

from collections.abc import Mapping
from typing import Any

SAMPLE_ON_CPU = "let the CPU sample it, generator=torch.Generator().manual_seed(...), or use equal GPUs"
"""What to do where GPUs of different kinds would sample different noise."""


def generators_of(kwargs: Mapping[str, Any]) -> list[Any]:
    """Return every torch.Generator among the arguments, in order, also those in lists."""
    lists = (value if isinstance(value, (list, tuple)) else [value] for value in kwargs.values())
    return [item for each in lists for item in each if _is_generator(item)]


def _is_generator(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and type(value).__name__ == "Generator"
