"""Content tokens of the prompt: words, without stop words and the special tokens for beginning, end and padding.

The denoiser gets embeddings, so token ids are recorded where the pipeline calls its text encoders.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.shard.hooks import HookSet

STOP_WORDS = frozenset(("a", "an", "the", "of", "on", "in", "at", "to", "and", "or", "with", "by", "is", ",", "."))
ENCODERS = (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2"), ("text_encoder_3", "tokenizer_3"))


class ContentTokens:
    """Token ids of an image's prompts. Call `reset` before every image, `close` at the end.

    `has_texts`: prompts are given as texts. Where they are embeddings, a text that is encoded is a negative prompt.
    """

    def __init__(self, pipe: Any) -> None:
        self.has_texts = True
        self._prompts: dict[str, Tensor] = {}
        self._tokenizers = {encoder: getattr(pipe, name, None) for encoder, name in ENCODERS}
        self._hooks = HookSet()
        for name, _ in ENCODERS:
            encoder = getattr(pipe, name, None)
            if isinstance(encoder, nn.Module):
                self._hooks.before(encoder, partial(self._note, name), with_kwargs=True)

    def _note(self, name: str, encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        if self.has_texts and isinstance(ids, Tensor) and ids.ndim == 2:
            self._prompts.setdefault(name, ids.detach().cpu())  # prompts come before negative prompts

    def reset(self) -> None:
        """Begin an image."""
        self._prompts.clear()

    def close(self) -> None:
        """Remove the hooks from the text encoders."""
        self._hooks.close()

    def weights(self, batch: int, count: int) -> Tensor:
        """Return 1 for each content token, else 0: [batch, count]. All but the first are 1 where no ids are known."""
        own = {name: self._weights_of(name) for name in self._prompts}
        found = _laid_out(list(own.values()), count)
        if found is None or batch % len(found):
            found = torch.ones(1, count)
            found[:, 0] = 0
        empty = found.sum(1) == 0  # an empty prompt
        found[empty, 1:] = 1
        return found.repeat_interleave(batch // len(found), 0)

    def _weights_of(self, name: str) -> Tensor:
        ids, tokenizer = self._prompts[name], self._tokenizers[name]
        if tokenizer is None:
            return torch.ones(ids.shape)
        special = set(tokenizer.all_special_ids)
        words = {
            each: each not in special and _bare(tokenizer.convert_ids_to_tokens(each)) not in STOP_WORDS
            for each in set(ids.flatten().tolist())
        }
        return torch.tensor([[float(words[each]) for each in row] for row in ids.tolist()])


def _bare(token: str) -> str:
    return token.removesuffix("</w>").lstrip("▁Ġ").lower()


def _laid_out(encoders: list[Tensor], count: int) -> Tensor | None:
    """Return [B, count]: weights of one encoder; of the first and then the last; or of the first and then zeros."""
    for weights in encoders:
        if weights.shape[1] == count:
            return weights.clone()
    if not encoders or encoders[0].shape[1] > count:
        return None
    first, last = encoders[0], encoders[-1]
    rest = torch.zeros(len(first), count - first.shape[1])
    return torch.cat([first, last if last.shape == rest.shape else rest], 1)
