"""Files that patchpar reads back may be anybody's: whatever is in them ends in a sentence, and never runs."""

from __future__ import annotations

import json
import logging
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.errors import PlanError
from patchpar.models.files import MAX_HEADER, inspect_folder
from patchpar.models.speech.config import SpeechConfig
from patchpar.models.streaming.causal.audio_conditioner import AudioConditioner, AudioConfig
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.stream_folder import StreamFolder
from patchpar.plan.json_files import LIMIT, read_object
from patchpar.shard.transformer.shipped_plans import FOLDER
from patchpar.shard.transformer.token_plan_json import from_json, to_json
from patchpar.shard.verification import _error
from patchpar.shard.verification_cache import VerificationCache
from patchpar.stream.journal import StreamJournal, as_words
from patchpar.stream.messages import PromptUpdate, ReferenceUpdate
from patchpar.stream.recording import StreamRecording
from tests.stream.test_journal import arrived, origin
from tests.stream.tiny import STREAM, write_folder
from tests.unit.test_model_folder import folder as image_folder

TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"a": ',
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a list": b"[]",
    "null": b"null",
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "a long number": b'{"a": ' + b"9" * 10_000 + b"}",
    "other facts": b'{"__class__": "os.system", "_class_name": {"a": []}}',
}
VALUES: tuple[Any, ...] = (None, True, -1, 0.5, 10**400, float("inf"), float("nan"), "os.system", [], {}, [[None]])
"""What stands where something else should, each in its turn."""


@pytest.fixture(scope="module")
def face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("face"))


def read_journal(file: Path) -> None:
    StreamRecording.read(file)


def read_shards(file: Path) -> None:
    image_folder(file.parent / "m")
    (file.parent / "m" / "unet" / "model.safetensors.index.json").write_bytes(file.read_bytes())
    inspect_folder(file.parent / "m")


def read_part(file: Path) -> None:
    image_folder(file.parent / "m")
    (file.parent / "m" / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    (file.parent / "m" / "unet" / "config.json").write_bytes(file.read_bytes())
    inspect_folder(file.parent / "m")


def read_index(file: Path) -> None:
    (file.parent / "model_index.json").write_bytes(file.read_bytes())
    inspect_folder(file.parent)


def read_stream(file: Path) -> None:
    (file.parent / "stream.json").write_bytes(file.read_bytes())
    StreamConfig.load(file.parent)


def read_audio(file: Path) -> None:
    (file.parent / "audio.json").write_bytes(file.read_bytes())
    AudioConditioner.load(file.parent)


def read_scheduler(file: Path) -> None:
    (file.parent / "scheduler").mkdir()
    (file.parent / "scheduler" / "scheduler_config.json").write_bytes(file.read_bytes())
    StreamConfig.load(file.parent)


def read_weights(file: Path) -> None:
    image_folder(file.parent / "m")
    text = file.read_bytes()
    weights = file.parent / "m" / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(text)) + text)
    inspect_folder(file.parent / "m")


READERS: list[Callable[[Path], None]] = [
    read_object,  # type: ignore[list-item]
    read_journal,
    read_index,
    read_part,
    read_shards,
    read_weights,
    read_stream,
    read_audio,
    read_scheduler,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_what_is_no_such_file_is_refused_in_words(read: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_bytes(TEXTS[text])
    if read is read_object and text == "other facts":
        assert read_object(file)
        return
    with pytest.raises(PlanError):
        read(file)


@pytest.mark.parametrize("text", TEXTS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize(("what", "read"), [("plan", from_json), ("relative_error", _error)])
def test_verifications_and_plans_that_are_broken_are_left_aside(
    what: str, read: Callable[[Any], Any], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They only cost a look at the model, and a line that says so."""
    verifications = VerificationCache(tmp_path)
    (tmp_path / "key.json").write_bytes(TEXTS[text])
    with caplog.at_level(logging.WARNING):
        assert verifications.find("key", what, read) is None
    assert f"{tmp_path / 'key.json'} is not what was written there" in caplog.text
    assert verifications.find("other", what, read) is None


def mutants(facts: Any) -> Iterator[Any]:
    """The same with one value, at any depth, in turn replaced by each of VALUES, or left out."""
    if isinstance(facts, (dict, list)):
        positions = list(facts) if isinstance(facts, dict) else list(range(min(len(facts), 2)))
        for position in positions:
            for value in (*VALUES, *mutants(facts[position])):
                changed = facts.copy()
                changed[position] = value
                yield changed
            changed = facts.copy()
            del changed[position]
            yield changed


def outcomes(read: Callable[[Any], Any], facts: Any, *kinds: type[Exception]) -> tuple[int, int]:
    """How many mutants were read, and how many were refused with one of `kinds`."""
    taken, refused = 0, 0
    for mutant in mutants(facts):
        try:
            read(mutant)
            taken += 1
        except kinds:
            refused += 1
    return taken, refused


def test_any_value_of_a_stream_may_be_wrong() -> None:
    facts = {**STREAM, "prompts": ["a"], "reference": "face.png", "sampler": "euler", "adapt_sink": True}
    taken, refused = outcomes(StreamConfig.of, facts, PlanError, TypeError)
    assert refused > 100 > taken > 0


def test_any_value_of_what_hears_may_be_wrong() -> None:
    facts = {"dim": 8, "heads": 2, "after": [0], "fps": 20.0, "rate": 2000, "bands": 2}
    taken, refused = outcomes(AudioConfig.of, facts, PlanError, TypeError)
    assert refused > 40 > taken > 0


def test_any_value_of_what_hears_speech_may_be_wrong() -> None:
    facts = {"dim": 8, "heads": 2, "after": [0], "fps": 25.0, "layers": 3, "context": 10, "continues": False}
    taken, refused = outcomes(SpeechConfig.of, facts, PlanError, TypeError)
    assert refused > 40 > taken > 0


def test_any_value_of_a_token_plan_may_be_wrong() -> None:
    found = json.loads((FOLDER / "FluxTransformer2DModel.json").read_text())["found"]
    plan = found[0]["plan"]
    assert to_json(from_json(json.dumps(plan)))
    taken, refused = outcomes(lambda x: from_json(json.dumps(x)), plan, ValueError, KeyError, TypeError)
    assert refused > taken > 0


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("journal") / "a.jsonl"
    image = torch.zeros(8, 12, 3, dtype=torch.uint8)
    taken = StreamJournal(path, origin())
    taken.note(*arrived(0, stream_run(), 0, PromptUpdate(text="a"), ReferenceUpdate(image=image)))
    taken.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def stream_run() -> Any:
    from tests.stream.test_session import COURSE

    return COURSE


@pytest.mark.parametrize("line", [0, 1])
def test_any_value_of_a_journal_may_be_wrong(line: int, journal: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"

    def read(changed: Any) -> StreamRecording:
        lines = [changed if number == line else facts for number, facts in enumerate(journal)]
        path.write_text("".join(json.dumps(facts) + "\n" for facts in lines))
        return StreamRecording.read(path)

    assert read(journal[line])
    taken, refused = outcomes(read, journal[line], PlanError)
    assert refused > 100
    assert taken < refused / 4


@pytest.mark.parametrize(
    ("shape", "message"),
    [([1, 1, 3], "whose shape needs"), ([2**27, 3], "at most 268435456 in 8"), ([1] * 9, "1 bytes in 9 dims")],
)
def test_a_small_line_may_not_become_a_large_tensor(
    shape: list[int], message: str, journal: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A gibibyte of zeros is a mebibyte when it is packed."""
    bomb = as_words(ReferenceUpdate(image=torch.zeros(2**25, dtype=torch.uint8)))["image"]
    line = {**journal[1], "updates": [{"kind": "ReferenceUpdate", "image": {**bomb, "shape": shape}}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(journal[0]) + "\n" + json.dumps(line) + "\n")
    tracemalloc.start()
    try:
        with pytest.raises(PlanError, match=message):
            StreamRecording.read(tmp_path / "a.jsonl")
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "entry",
    [[], ["diffusers"], ["diffusers", 3], ["diffusers", "A", "B"], [None], [{}, []], [None, None, None]],
    ids=str,
)
def test_an_entry_of_an_index_that_names_no_class(entry: Any, tmp_path: Path) -> None:
    index = image_folder(tmp_path) / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "unet": entry}))
    with pytest.raises(PlanError, match=r"model_index.json: unet is .* \[library, class\]"):
        inspect_folder(tmp_path)


def test_options_of_a_pipeline_may_be_lists(tmp_path: Path) -> None:
    index = image_folder(tmp_path) / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "layers": [9, 18], "_ignore_files": ["a.bin"]}))
    assert inspect_folder(tmp_path).weight_bytes > 0


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "a b"])
def test_a_part_lies_in_the_folder_of_its_model(name: str, tmp_path: Path) -> None:
    index = image_folder(tmp_path) / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), name: ["diffusers", "UNet2DConditionModel"]}))
    with pytest.raises(PlanError, match="can be no part of a pipeline"):
        inspect_folder(tmp_path)


@pytest.mark.parametrize("shard", ["model.bin", "../model.safetensors", 3])
def test_an_index_of_shards_leads_to_safetensors_beside_it(shard: object, tmp_path: Path) -> None:
    index = image_folder(tmp_path) / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "diffusion_pytorch_model.safetensors"}}))
    assert inspect_folder(tmp_path).num_weights
    index.write_text(json.dumps({"weight_map": {"weight": shard}}))
    with pytest.raises(PlanError, match=r"index\.json"):
        inspect_folder(tmp_path)


def test_of_a_long_header_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format ends at 100 MB; a sparse file of 1.5 GB that says it is all header costs no memory."""
    file = image_folder(tmp_path) / "unet" / "diffusion_pytorch_model.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 1_500_000_000))
        stream.truncate(1_600_000_000)
    monkeypatch.setattr("patchpar.models.files.object_of", lambda *_: pytest.fail("it was read"))
    with pytest.raises(PlanError, match="not a whole safetensors file"):
        inspect_folder(tmp_path)
    assert MAX_HEADER == 100_000_000


def test_a_long_file_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as stream:
        stream.truncate(LIMIT + 1)
    with pytest.raises(PlanError, match=f"more than {LIMIT} bytes"):
        read_object(tmp_path / "a.json")


def test_any_number_of_a_stream_folder_may_be_wrong(face: Path, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(face, tmp_path / "m"))
    for file, name in (
        (folder / "vae" / "config.json", "scale_factor_temporal"),
        (folder / "transformer" / "audio.json", "rate"),
    ):
        facts = json.loads(file.read_text())
        for value in VALUES:
            file.write_text(json.dumps({**facts, name: value}))
            with pytest.raises(PlanError, match=name):
                StreamFolder.read(folder)
        file.write_text(json.dumps(facts))
    assert StreamFolder.read(folder).frames
