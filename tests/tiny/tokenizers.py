"""Tokenizers made in memory: one token per byte or character, no files, no network."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LAST_WORDS = "{% for part in messages[-1]['content'] %}{{ part['text'] }}{% endfor %}"
_QWEN_SPECIAL = ["im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


@cache
def clip() -> Any:
    """514 ids: 256 bytes, 256 bytes that end a word, start 512, end 513."""
    from transformers import CLIPTokenizer

    pieces = _alphabet() + [piece + "</w>" for piece in _alphabet()] + ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


@cache
def t5() -> Any:
    """98 ids: pad 0, end 1, unknown 2, the word mark, printable ASCII."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    letters = [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=special + letters, extra_ids=0, model_max_length=512)


@cache
def qwen() -> Any:
    """264 ids: 256 bytes, end of text 256, seven marks of a chat."""
    from transformers import Qwen2Tokenizer

    pieces = [*_alphabet(), "<|endoftext|>"]
    marks = [f"<|{name}|>" for name in _QWEN_SPECIAL]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], model_max_length=4096, additional_special_tokens=marks)
    tokenizer.chat_template = _CHAT
    return tokenizer


@cache
def mistral() -> Any:
    """The same ids; of a chat it reads what was said last, for the rest would leave no room for it."""
    tokenizer = copy.deepcopy(qwen())
    tokenizer.chat_template = _LAST_WORDS
    return tokenizer


@cache
def llama() -> Any:
    """260 ids: pad, start, end, unknown, 256 bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: i for i, piece in enumerate(["<pad>", "<s>", "</s>", "<unk>", *_alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2048, **special)


@cache
def xlm_roberta() -> Any:
    """The same ids; a start and an end stand around every text."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(llama())
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


@cache
def roberta() -> Any:
    """261 ids: start, pad, end, unknown, 256 bytes, mask."""
    from transformers import RobertaTokenizer

    pieces = ["<s>", "<pad>", "</s>", "<unk>", *_alphabet(), "<mask>"]
    return RobertaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)
