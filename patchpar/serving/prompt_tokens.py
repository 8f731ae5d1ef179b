"""Tokens of prompts: how many the tokenizers of a model make of one, and how many of them its text encoders take."""

from typing import Any

from patchpar.models.task import ANY_PROMPT

TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4")
LENGTH_PARAMETER = "max_sequence_length"
"""Of pipelines that cut prompts at a length of their own, and may count other tokens than those of the prompt."""
LARGEST_LIMIT = 2**20  # transformers has 10^30 where a tokenizer knows no limit


class PromptTokens:
    """Tokens by the tokenizers of an open pipeline."""

    def __init__(self, pipe: Any) -> None:
        found = [each for name in TOKENIZERS if (each := getattr(pipe, name, None)) is not None]
        self._first = found[0] if found and _takes_text(found[0]) else None
        limits = [int(getattr(each, "model_max_length", LARGEST_LIMIT)) for each in found]
        cuts = bool(limits) and LENGTH_PARAMETER not in pipe.description.parameters and max(limits) < LARGEST_LIMIT
        self._limit = max(limits) if cuts else None

    def count(self, prompt: str) -> int:
        """Return the number of tokens by the first tokenizer; 0 if it takes no plain text."""
        return 0 if self._first is None else len(self._first(prompt)["input_ids"])

    def unused(self, prompt: str) -> str:
        """Return how many tokens the prompt has and how many are used; empty where all are, or it is unknown."""
        if self._limit is None or len(prompt.encode()) < self._limit:
            return ""
        count = self.count(prompt)
        return "" if count <= self._limit else f"has {count} tokens, of which this model takes {self._limit}"


def _takes_text(tokenizer: Any) -> bool:
    try:
        tokenizer(ANY_PROMPT)["input_ids"]
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return True
