"""A stream that was taken down can be made again bit for bit, on any ranks; another line makes another stream."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.errors import PlanError
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import Chunk, StreamDelivery
from patchpar.stream.events import Parameter, Reference
from patchpar.stream.journal import LIMIT, JournalHeader, StreamJournal, as_update, as_words
from patchpar.stream.messages import BeginBlock, LostStage, PromptUpdate, ReferenceUpdate, StreamRun
from patchpar.stream.recording import RecordedAudio, StreamRecording
from tests.stream.test_session import COURSE, Ranks, session
from tests.stream.test_streaming_pipeline import FACE, SPEECH
from tests.stream.tiny import STREAM, write_folder
from tests.tensors import noise


@pytest.fixture(scope="module")
def taken_down(one: StreamingPipeline, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Chunk]]:
    """A journal, and the chunks that came out."""
    path = tmp_path_factory.mktemp("journal") / "session.jsonl"
    delivery = StreamDelivery(record=path)
    with one.stream("a fox", reference=FACE, audio=(SPEECH, 2000), seed=3, delivery=delivery) as stream:
        stream.set_prompt("a hen", at=3, transition="blend", over=2)
        stream.set_param("audio_scale", 2.0, at=4)
        return path, list(stream)


def changed(path: Path, line: int, target: Path, **facts: Any) -> Path:
    """A journal with other facts in one of its lines."""
    lines = path.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **facts})
    target.write_text("\n".join(lines) + "\n")
    return target


def differing(pipe: StreamingPipeline, path: Path) -> list[int]:
    recording = StreamRecording.read(path)
    with pipe.replay(recording) as stream:
        chunks = list(stream)
    assert [chunk.block for chunk in chunks] == list(range(len(recording.blocks)))
    return [chunk.block for chunk in chunks if not recording.is_as_it_was(chunk)]


@pytest.mark.parametrize("which", ["one", "three"])
def test_the_same_bits_again(which: str, taken_down: Any, request: pytest.FixtureRequest) -> None:
    pipe: StreamingPipeline = request.getfixturevalue(which)
    path, before = taken_down
    assert differing(pipe, path) == []
    with pipe.replay(StreamRecording.read(path)) as stream:
        again = list(stream)
    assert all(torch.equal(a.frames, b.frames) for a, b in zip(before, again, strict=True))
    assert [chunk.pts for chunk in before] == [chunk.pts for chunk in again]
    played = [torch.cat([chunk.audio for chunk in chunks]) for chunks in (before, again)]
    assert (played[0].clamp(-1, 1) - played[1]).abs().max() <= 0.5 / 32767 + 1e-7


def test_what_a_recording_determines_is_not_chosen(one: StreamingPipeline, taken_down: Any, tmp_path: Path) -> None:
    recording = StreamRecording.read(taken_down[0])
    for options, message in (
        ({"record": tmp_path / "again.jsonl"}, "again.jsonl': a replay is what its recording says: copy that"),
        ({"keep_alive": True}, "the audio of a replay is recorded"),
        ({"fps": 7}, "fps=7: this stream was recorded with 20 frames a second"),
    ):
        with pytest.raises(PlanError, match=message):
            one.replay(recording, delivery=StreamDelivery(**options))
    assert not (tmp_path / "again.jsonl").exists()


def test_another_line_is_another_stream(one: StreamingPipeline, taken_down: Any, tmp_path: Path) -> None:
    """From its block on and not before, and the comparison sees it."""
    path, target = taken_down[0], tmp_path / "a.jsonl"
    update = {"kind": "PromptUpdate", "text": "a cow", "transition": "blend", "over": 2}
    assert differing(one, changed(path, 4, target, updates=[update])) == [3, 4, 5]
    assert differing(one, changed(path, 5, target, updates=[])) == [4, 5]
    assert differing(one, changed(path, 0, target, seed=4)) == list(range(6))
    silent = StreamRecording.read(path).blocks[5].heard[0] * 0
    other = as_words(Reference(latents=silent))["latents"]
    assert differing(one, changed(path, 6, target, heard=[other])) == [5]


def test_a_broken_end_is_left_out(one: StreamingPipeline, taken_down: Any, tmp_path: Path) -> None:
    """As it is when the process was killed in the middle of a line."""
    (tmp_path / "a.jsonl").write_text(taken_down[0].read_text()[:-40])
    assert len(StreamRecording.read(tmp_path / "a.jsonl").blocks) == 5
    assert differing(one, tmp_path / "a.jsonl") == []


def test_a_path_in_the_home_folder(one: StreamingPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with one.stream("a fox", seconds=0.1, delivery=StreamDelivery(record="~/a.jsonl")) as stream:
        assert len(list(stream)) == 1
    assert (tmp_path / "a.jsonl").is_file()
    assert len(StreamRecording.read("~/a.jsonl").blocks) == 1


def test_a_stream_without_audio(tmp_path: Path, one: StreamingPipeline) -> None:
    path = tmp_path / "a.jsonl"
    with StreamingPipeline.from_pretrained(write_folder(tmp_path / "m", hears=False), devices="cpu") as pipe:
        with pipe.stream("a fox", seconds=0.3, delivery=StreamDelivery(record=path)) as stream:
            assert len(list(stream)) == 2
        assert differing(pipe, path) == []
    with pytest.raises(PlanError, match=r"recorded with"):
        one.replay(StreamRecording.read(path))


# --- what is taken down --------------------------------------------------------------------------------------------

ORIGIN: dict[str, Any] = {
    "model": "m", "config": STREAM, "options": {}, "seed": 0, "fps": 20, "size": [4, 6], "versions": {}, "format": 1,
}  # fmt: skip


def origin() -> JournalHeader:
    from patchpar.models.streaming.config import StreamConfig

    return JournalHeader(
        model="m", config=StreamConfig.of(STREAM), options={}, seed=0, fps=20, size=(4, 6), versions={}
    )


def arrived(block: int, course: StreamRun = COURSE, epoch: int = 0, *wishes: Any) -> tuple[Any, ...]:
    frames = noise(4, 8, 12, 3, seed=block).to(torch.uint8)
    begun = BeginBlock(inputs=(noise(1, 2, 3, 4),), updates=wishes)
    chunk = Chunk(block=block, frames=frames, pts=0.0, audio=torch.zeros(400), latency=0.1, epoch=epoch)
    return chunk, begun, course, ()


@pytest.mark.parametrize(
    "update",
    [
        PromptUpdate(text="a “fox”\n", transition="blend", over=3),
        ReferenceUpdate(image=FACE),
        Parameter(name="audio_scale", value=0.1),
        Reference(latents=noise(1, 4, 1, 2, 2).to(torch.bfloat16)),
    ],
    ids=lambda update: type(update).__name__,
)
def test_every_change_survives(update: Any) -> None:
    found = as_update(json.loads(json.dumps(as_words(update))))
    assert type(found) is type(update)
    for name in update.__dataclass_fields__:
        a, b = getattr(found, name), getattr(update, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    ("update", "name"),
    [
        (ReferenceUpdate(image=FACE), "image"),
        (Reference(latents=noise(1, 4, 1, 2, 2)), "latents"),
        (Reference(latents=noise(1, 4, 1, 2, 2)), "video"),
    ],
)
def test_what_has_to_be_a_tensor_is_one(update: Any, name: str) -> None:
    """None only where a change may have none."""
    for value in ("a", None)[: 1 + (name != "video")]:
        with pytest.raises(PlanError, match=f"{name}={value!r}: it must be a tensor"):
            as_update({**as_words(update), name: value})


def test_a_recording_fits_a_model_of_its_shapes(tmp_path: Path) -> None:
    StreamJournal(tmp_path / "a.jsonl", origin()).note(*arrived(0, COURSE, 0, ReferenceUpdate(image=FACE)))
    recording = StreamRecording.read(tmp_path / "a.jsonl")
    (block,) = recording.blocks
    recording.check_fits((4, 6), (1, 2, 3, 4))
    sink = Reference(latents=noise(1, 16, 1, 4, 6))
    replace(recording, blocks=(replace(block, updates=(sink,)),)).check_fits((4, 6), (1, 2, 3, 4))
    small = (ReferenceUpdate(image=FACE[:4]),)
    for changed, heard, message in (
        (block, None, "audio of another shape"),
        (block, (1, 2, 3, 5), "audio of another shape"),
        (replace(block, audio=None), (1, 2, 3, 4), "has no audio samples"),
        (replace(block, audio=torch.zeros(2, 200)), (1, 2, 3, 4), "has no audio samples"),
        (replace(block, updates=small), (1, 2, 3, 4), r"a reference of \(4, 12, 3\), but the stream takes \(8, 12, 3"),
        *(
            (replace(block, updates=(Reference(latents=noise(*shape)),)), (1, 2, 3, 4), r"has \(1, C, 1, 4, 6\)")
            for shape in ((1, 16, 1, 4, 5), (1, 16, 2, 4, 6), (2, 16, 1, 4, 6), (16, 1, 4, 6))
        ),
    ):
        with pytest.raises(PlanError, match=message):
            replace(recording, blocks=(changed,)).check_fits((4, 6), heard)


def test_epochs_are_made_again_as_they_were(tmp_path: Path) -> None:
    """A worker died before block 4: the recording has two courses, and the second begins with what held then."""
    path, ranks = tmp_path / "a.jsonl", Ranks((0, 4))
    with session(ranks, blocks=7, credit=1).begin(
        PromptUpdate(text="first"), journal=StreamJournal(path, origin())
    ) as stream:
        before = list(stream)
    recording = StreamRecording.read(path)
    assert all(map(recording.is_as_it_was, before))
    first, second = recording.runs(COURSE)
    assert (first, second) == tuple(replace(run, keep=0) for run in ranks.runs)
    again = Ranks()
    replayed = session(again, blocks=7, credit=1, courses=(first, second))
    with replayed.begin(changes=recording.updates()) as stream:
        after = list(stream)
    assert again.runs == ranks.runs
    assert [(c.block, c.epoch) for c in before] == [(c.block, c.epoch) for c in after]
    wishes = [[(b, [type(w) for w in o.updates]) for b, o in one.begun if o.updates] for one in (ranks, again)]
    assert wishes[1] == [(0, [PromptUpdate]), (4, [PromptUpdate, Reference])]
    assert wishes[0] == [(0, [PromptUpdate]), (4, [PromptUpdate, Reference])]


def test_a_block_is_read_as_it_was_noted(tmp_path: Path) -> None:
    """But audio beyond the limits of its 16 bits, which is played at these."""
    path, lost = tmp_path / "a.jsonl", (LostStage(block=0, start=1, stop=2, decodes=True, refills=False),)
    chunk, begun, course, _ = arrived(0)
    chunk = replace(chunk, audio=torch.tensor([2.0, -2.0, 0.5]))
    StreamJournal(path, origin()).note(chunk, begun, course, lost)
    (block,) = StreamRecording.read(path).blocks
    assert block.lost == lost
    heard, samples = RecordedAudio((block,)).take(0)
    assert torch.equal(heard, begun.inputs[0])
    assert samples[:2].tolist() == [1.0, -1.0]
    assert samples[2] == pytest.approx(0.5, abs=1 / 32767)


def test_a_recording_may_be_as_long_as_its_limit(tmp_path: Path) -> None:
    """And no byte longer."""

    def blocks(limit: int) -> int:
        journal = StreamJournal(tmp_path / "a.jsonl", origin(), limit=limit)
        for block in range(3):
            journal.note(*arrived(block))
        return journal.blocks

    blocks(10**6)
    size = (tmp_path / "a.jsonl").stat().st_size
    assert (blocks(size), blocks(size - 1)) == (3, 2)


def test_silence_takes_next_to_nothing_and_a_limit_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    journal = StreamJournal(path, origin(), limit=4000)
    with caplog.at_level(logging.WARNING):
        for block in range(100):
            journal.note(*arrived(block))
    assert path.stat().st_size <= 4000
    assert len(StreamRecording.read(path).blocks) == journal.blocks > 5
    assert [record.message for record in caplog.records] == [
        f"{path} ends after {journal.blocks} blocks: it has reached its limit of 4000 bytes; the stream continues"
    ]


def test_a_full_disk_ends_the_recording_and_not_the_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file on a full disk refuses what it has not written once more when it is closed."""
    journal = StreamJournal(tmp_path / "a.jsonl", origin())
    journal.close()
    journal._file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115  closed by the journal
    with session(Ranks(), blocks=3).begin(journal=journal) as stream:
        assert len(list(stream)) == 3
    assert "No space left on device; the stream continues" in caplog.text


def with_options(**options: Any) -> JournalHeader:
    return replace(origin(), options=options)


def test_a_journal_keeps_dtype_and_variant_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A token is written nowhere; what is left out is named, without its value."""
    path, options = tmp_path / "a.jsonl", {"token": "hf_secret", "vae": object(), "trust_remote_code": True}
    with caplog.at_level(logging.WARNING):
        StreamJournal(path, with_options(torch_dtype=torch.bfloat16, variant="fp16", **options)).close()
    assert json.loads(path.read_text())["options"] == {"torch_dtype": "bfloat16", "variant": "fp16"}
    assert "does not store the options token, trust_remote_code, vae" in caplog.text
    assert "hf_secret" not in path.read_text() + caplog.text
    caplog.clear()
    StreamJournal(path, with_options(dtype="float16")).close()
    assert json.loads(path.read_text())["options"] == {"torch_dtype": "float16"}
    assert not caplog.records


@pytest.mark.parametrize("options", [{"torch_dtype": "load"}, {"torch_dtype": 3}, {"variant": "../x"}])
def test_a_dtype_or_variant_that_is_none_is_written_nowhere(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"record=.*{next(iter(options))}"):
        StreamJournal(tmp_path / "a.jsonl", with_options(**options))
    assert not (tmp_path / "a.jsonl").exists()


def test_only_its_owner_can_read_a_journal(tmp_path: Path) -> None:
    """Also where a longer file of that name was there before, but for a pipe: devices are for all."""
    (tmp_path / "old.jsonl").write_text("old\n" * 1000)
    (tmp_path / "old.jsonl").chmod(0o644)
    for name in ("new.jsonl", "old.jsonl"):
        StreamJournal(tmp_path / name, origin()).close()
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert len((tmp_path / name).read_text().splitlines()) == 1
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").chmod(0o620)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    StreamJournal(tmp_path / "pipe", origin()).close()
    os.close(reader)
    assert stat.S_IMODE((tmp_path / "pipe").stat().st_mode) == 0o620


@pytest.mark.parametrize(
    "options",
    [
        {"custom_pipeline": "elsewhere", "trust_remote_code": True},
        {"trust_remote_code": True},
        {"token": "hf_secret"},
        {"torch_dtype": "load"},
        {"variant": ["fp16"]},
    ],
    ids=str,
)
def test_other_options_are_not_taken_from_a_journal(taken_down: Any, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"line 1.*(not read from a recording|torch_dtype=|variant=)"):
        StreamRecording.read(changed(taken_down[0], 0, tmp_path / "a.jsonl", options=options))


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"kind": "Prompt", "text": as_words(Reference(latents=noise(1, 2, 3)))["latents"]}, "no block.*'Prompt'"),
        ({"kind": "PromptUpdate", "text": as_words(Reference(latents=noise(1, 2, 3)))["latents"]}, "it must be a text"),
        ({"kind": "PromptUpdate", "text": ["a"]}, r"prompt=\['a'\]: it must be a text"),
        ({"kind": "PromptUpdate", "text": "a", "transition": "blend", "over": "2"}, "over='2'"),
    ],
    ids=str,
)
def test_a_prompt_of_a_recording_is_a_text(update: Any, message: str, tmp_path: Path) -> None:
    """Not embeddings, which might fit no layer."""
    line = {"block": 0, "epoch": 0, "frames": "", "adapt_sink": False, "updates": [update]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(ORIGIN)}\n{json.dumps(line)}\n")
    with pytest.raises(PlanError, match=message):
        StreamRecording.read(tmp_path / "a.jsonl")


def test_a_recording_of_other_shapes_is_another_model(one: StreamingPipeline, taken_down: Any, tmp_path: Path) -> None:
    """Refused before any rank works, and not by a rank that runs out of memory."""
    path, target = taken_down[0], tmp_path / "a.jsonl"
    with pytest.raises(PlanError, match="recorded with latents"):
        one.replay(StreamRecording.read(changed(path, 0, target, size=[16384, 16384])))
    long = as_words(Reference(latents=noise(1, 4, 1, 2, 2)))["latents"]
    with pytest.raises(PlanError, match="has audio of another shape"):
        one.replay(StreamRecording.read(changed(path, 2, target, heard=[long])))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its first line is no header"),
        ("[]\n", "its first line is no header"),
        (json.dumps({**ORIGIN, "model": 3}) + "\n", "model=3: it must be a text"),
        (json.dumps({**ORIGIN, "seed": 2**64}) + "\n", "seed=18446744073709551616: it must be"),
        (json.dumps({**ORIGIN, "size": [2**40, 6]}) + "\n", "rows=1099511627776: it must be"),
        (json.dumps({**ORIGIN, "versions": {"torch": "\x1b[2J"}}) + "\n", "must be package names with their versions"),
        ('{"format": 9}\n', "has format 9, and this patchpar reads format 1"),
        ('{"format": 1}\n', "line 1: the header is invalid"),
        (json.dumps(ORIGIN) + "\n", "has no block"),
        (json.dumps(ORIGIN) + "\nnonsense\n", "line 2 is no block of a stream"),
        (json.dumps(ORIGIN) + '\n{"block": 1, "epoch": 0, "frames": ""}\n', "a line is missing"),
        (json.dumps(ORIGIN) + '\n{"block": 0, "epoch": 0, "frames": "", "updates": [{"kind": "x"}]}\n', "line 2 is no"),
        (json.dumps(ORIGIN) + '\n{"block": 0, "epoch": 0, "frames": "", "colour": 1}\n', "line 2 is no"),
        (json.dumps(ORIGIN) + '\n{"block": 0, "epoch": 0, "frames": ""}\n', "has no block"),
        (json.dumps(ORIGIN) + '\n{"block": 0, "epoch": 0, "frames": 3}\n', "frames=3: it must be"),
        (
            json.dumps(ORIGIN) + '\n{"block": 0, "epoch": 0, "frames": "", "adapt_sink": 1}\n',
            "adapt_sink=1: it must be",
        ),
    ],
)
def test_what_is_no_journal(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(PlanError, match=message):
        StreamRecording.read(tmp_path / "a.jsonl")
    with pytest.raises(PlanError, match="cannot be read as the recording"):
        StreamRecording.read(tmp_path)
    (tmp_path / "a.mp4").write_bytes(b"text, then \xff\n")
    with pytest.raises(PlanError, match=r"a\.mp4 is no recording of a stream: byte 11 is not text\. Give the file"):
        StreamRecording.read(tmp_path / "a.mp4")
    os.truncate(tmp_path / "a.jsonl", LIMIT + 1)
    with pytest.raises(PlanError, match=f"more than {LIMIT} bytes"):
        StreamRecording.read(tmp_path / "a.jsonl")
