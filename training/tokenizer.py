"""A CLIP tokenizer built in code: byte-level pairs whose merges make one token of every word of the captions."""

from __future__ import annotations

from functools import lru_cache

from transformers import CLIPTokenizer

from training.scenes import vocabulary

MAX_TOKENS = 28
_START, _END, _WORD_END = "<|startoftext|>", "<|endoftext|>", "</w>"


@lru_cache(maxsize=1)
def build_tokenizer() -> CLIPTokenizer:
    """The tokenizer of both text encoders. Words outside the captions fall apart into letters."""
    vocab = {symbol: index for index, symbol in enumerate(_byte_symbols())}
    for symbol in list(vocab):
        vocab[symbol + _WORD_END] = len(vocab)
    merges: dict[tuple[str, str], None] = {}
    for word in vocabulary():
        for pair in _merges_of(word):
            merges[pair] = None
            vocab.setdefault("".join(pair), len(vocab))
    for special in (_START, _END):
        vocab[special] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=list(merges), model_max_length=MAX_TOKENS)


def token_ids(tokenizer: CLIPTokenizer, captions: list[str]):
    """Token ids (B, MAX_TOKENS), padded."""
    options = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True, "return_tensors": "pt"}
    return tokenizer(captions, **options).input_ids


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 byte values, as in GPT-2 and CLIP."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(code) for code in printable] + [chr(256 + index) for index in range(256 - len(printable))]


def _merges_of(word: str) -> list[tuple[str, str]]:
    """The merges that build a word from its last letter backwards."""
    suffix, pairs = word[-1] + _WORD_END, []
    for letter in reversed(word[:-1]):
        pairs.append((letter, suffix))
        suffix = letter + suffix
    return pairs
