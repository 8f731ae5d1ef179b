"""Which tokens of the text say what is in the picture: words, but not marks of beginning, end and padding.

The denoiser is given embeddings, so the tokens are read where the pipeline hands them to its text encoders.
"""

from typing import Any

import torch
from torch import Tensor, nn

from patchpar.shard.hooks import HookSet

STOP_WORDS = frozenset(("a", "an", "the", "of", "on", "in", "at", "to", "and", "or", "with", "by", "is", ",", "."))
ENCODERS = (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2"), ("text_encoder_3", "tokenizer_3"))


class ContentTokens:
    """The tokens of the prompts of one picture after the other. `reset` belongs before each, `close` at the end."""

    def __init__(self, pipe: Any) -> None:
        self._prompts: dict[str, Tensor] = {}
        self._tokenizers = {encoder: getattr(pipe, name, None) for encoder, name in ENCODERS}
        found = {name: getattr(pipe, name, None) for name, _ in ENCODERS}
        self._hooks = HookSet()
        for name, module in found.items():
            if isinstance(module, nn.Module):
                self._listen(name, module)

    def _listen(self, name: str, encoder: nn.Module) -> None:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = args[0] if args else kwargs.get("input_ids")
            if isinstance(ids, Tensor) and ids.ndim == 2:
                self._prompts.setdefault(name, ids.detach().cpu())  # prompts come before negative prompts

        self._hooks.before(encoder, note, with_kwargs=True)

    def reset(self) -> None:
        """Begin a picture."""
        self._prompts.clear()

    def close(self) -> None:
        """Stop listening."""
        self._hooks.close()

    def weights(self, batch: int, count: int) -> Tensor:
        """1 for each content token of `count`, else 0: (batch, count). All but the first where nothing is known."""
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
    """Weights of `count` tokens: of one encoder; of the first and then the last; of the first and then nothing."""
    for weights in encoders:
        if weights.shape[1] == count:
            return weights.clone()
    if not encoders or encoders[0].shape[1] > count:
        return None
    first, last = encoders[0], encoders[-1]
    rest = torch.zeros(len(first), count - first.shape[1])
    return torch.cat([first, last if last.shape == rest.shape else rest], 1)
