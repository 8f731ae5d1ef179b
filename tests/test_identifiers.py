"""Identifiers use the terms of torch, diffusers and NCCL: words of an earlier vocabulary do not come back."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.sources import line_of, tokens_of

ROOT = Path(__file__).parents[1]
FOLDERS = ("patchpar", "app", "benchmarks", "tests", "training", "pipelines")

OLD_WORDS = {
    "picture": "image",
    "film": "video",
    "sound": "audio",
    "draw": "generate or run",
    "drawn": "generated or results",
    "drawing": "call or generation",
    "door": "comm",
    "swap": "exchange or send_recv",
    "place": "group_rank, index or position",
    "promise": "async_tensor",
    "share": "patch, part or fraction",
    "treatment": "policy",
    "seam": "exchange point",
    "coming": "pending",
    "told": "gathered, listed or size_conditioning",
    "tell": "send, report or print",
    "deaf": "not_reading",
    "everyone": "all_ranks or gathered",
    "verdict": "verification or result",
    "ledger": "recorder",
    "beacon": "heartbeat",
    "mark": "beat",
    "hello": "config",
    "dialogue": "loop",
    "hush": "silence_libraries",
    "portion": "partial_prediction",
    "meeting": "merge",
    "surroundings": "window_context",
    "spot": "position",
    "crew": "workers or group",
    "wish": "update or request",
    "said": "prompt_update or message",
    "shown": "output or patch_at",
    "came": "state",
    "ears": "audio_encoder",
    "mates": "peers",
    "shot": "result",
    "studio": "state",
    "desk": "job_queue",
    "artist": "image_runner",
    "visits": "sessions",
}

NOT_OURS = {
    *("PictureType", "ImageDraw", "Draw", "share_memory_", "T5FilmDecoder"),
    *("control_layers_places", "control_refiner_layers_places"),
}
"""Names in other packages."""
ALLOWED = {
    (
        "patchpar/models/streaming/causal/audio_conditioner.py",
        "place",
    ),  # a parameter is called as its tensor in the weights
    ("tests/", "mark"),  # pytest's
    ("tests/", "marks"),
    ("training/", "draw"),  # Pillow's ImageDraw.Draw(...)
    ("tests/", "in_place"),  # as torch has it
    ("tests/", "_in_place"),
    ("tests/", "change_in_place"),
    ("tests/", "InPlace"),
    ("benchmarks/highres/", "seam_index"),  # of seams that are seen in images
    ("benchmarks/highres/", "seam_z"),
    ("tests/highres/", "seam_index"),
}
"""Folders or files, and names that they may have."""
IN_SENTENCES = {"told", "tell", "said", "place", "share", "shown", "came", "seam", "promise", "mark", "spot"}
"""Words of plain English, which the name of a test may have: it is a sentence."""


def words_of(name: str) -> list[str]:
    """The words of an identifier, without the s of a plural: `_oldPlaces_BC` has old, place, bc."""
    words = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return [each for word in words for each in ((word, word[:-1]) if word.endswith("s") else (word,))]


@cache
def old_words_of(name: str) -> list[str]:
    """The old words of an identifier that it may not have."""
    words = [word for word in words_of(name) if word in OLD_WORDS and name not in NOT_OURS]
    return [word for word in words if not (name.startswith("test_") and word in IN_SENTENCES)]


def old_names(source: str) -> list[str]:
    """Identifiers of Python source that contain an old word, with their lines."""
    return [
        f"{line_of(source, token)}: {token.text} ({word}: use {OLD_WORDS[word]})"
        for token in tokens_of(source, "name")
        for word in old_words_of(token.text)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_identifiers_have_no_old_words(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [f"{file.relative_to(ROOT)}:{name}" for file in files for name in old_names(file.read_text())]
    found = [each for each in found if not any(each.startswith(file) and f" {name} " in each for file, name in ALLOWED)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source", ["own_share = 1", "def send(door): ...", "class PictureSink: ...", "x.verdicts"])
def test_an_old_word_is_found(source: str) -> None:
    assert old_names(source)


def test_words_inside_other_words_are_not_found() -> None:
    assert not old_names("replaced = shareable_profile(withdrawn=swapaxes, roundtrip=placement)")
