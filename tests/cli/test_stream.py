"""`patchpar stream`: sound, face and prompt in, a video with its sound out; frames drawn anew; what is refused."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import av
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from typer.testing import CliRunner
from websockets.sync.client import connect

from patchpar.cli import app, video_file
from patchpar.cli.stream import live_inputs
from patchpar.cli.stream.flags import FPS, Late, StreamFlags
from patchpar.cli.stream.forecast import parse_costs
from patchpar.cli.stream.run import FrameOutputs, ProgressMeter, StreamEnding, TimedFrames, paced, show_all
from patchpar.cli.stream.video import _audio
from patchpar.errors import PatchparError, PlanError
from patchpar.models.files import embedded_model
from patchpar.models.streaming import config
from patchpar.models.streaming.video_folder import SELF_FORCING
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import Output, StreamDelivery
from patchpar.stream.images.pipeline import ImageStreamingPipeline
from patchpar.stream.journal import StreamJournal
from patchpar.stream.recording import StreamRecording
from tests.breadth import first_of
from tests.cli.test_output_files import small_disk
from tests.cli.test_real import assert_libraries_are_silent
from tests.media.test_audio_file import tone, write_wav
from tests.stream.test_images import quiet
from tests.stream.test_journal import arrived, origin
from tests.stream.tiny import write_folder
from tests.tiny import image_pipelines
from tests.web.test_pages import jpegs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that hears, of 20 frames per second in blocks of 3, 4, 4 and so on, 8 x 12 pixels."""
    return write_folder(tmp_path_factory.mktemp("face"))


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("img2img")
    pipe, _ = image_pipelines.sd_img2img()
    pipe.register_modules(safety_checker=None, feature_extractor=None)
    pipe.save_pretrained(path)
    return path


def decoded(path: Path) -> tuple[np.ndarray, list[float], np.ndarray]:
    """(frames, their times, samples at 48000 per second) of a file."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    with av.open(str(path)) as container:
        speech = [frame.to_ndarray()[0] for frame in container.decode(audio=0)] if container.streams.audio else []
    pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
    return pixels, [float(frame.time) for frame in frames], np.concatenate(speech) if speech else np.zeros(0)


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["stream", *map(str, words)])


def test_two_stages_and_a_decoder_make_a_video_with_audio(run: Any, folder: Path, tmp_path: Path) -> None:
    """Frames are those of one process, at their times; the sound is what was spoken, at its time."""
    loud_at = np.where(np.arange(8000) // 2000 % 2 == 1, tone(8000, 1.0), 0)  # silent, loud, silent, loud
    speech = write_wav(tmp_path / "speech.wav", loud_at, 8000)
    Image.new("RGB", (50, 40), "teal").save(tmp_path / "face.png")
    words = ("a fox", "--model", folder, "--audio", speech, "--reference", tmp_path / "face.png", "--seed", 3)
    result = run("stream", *words, "--dtype", "float32", "--devices", "cpu:3", "-o", tmp_path / "talk.mp4")
    assert result.exit_code == 0, result.stderr
    plan, figures, saved = result.stdout.strip().splitlines()
    assert plan.startswith("2 steps on 3 ranks")
    assert figures.startswith("23 frames at ")
    assert figures.endswith("; 1.1 s")
    assert saved == f"saved {tmp_path / 'talk.mp4'}"
    assert f"{speech}: pcm_s16le, 8000 samples/s, 1 channel, 1.0 s" in result.stderr
    assert_libraries_are_silent(result.stderr)

    pixels, times, heard = decoded(tmp_path / "talk.mp4")
    assert times == pytest.approx([number / 20 for number in range(23)], abs=1e-3)
    with StreamingPipeline.from_pretrained(folder, devices="cpu") as pipe:
        arguments = {"reference": tmp_path / "face.png", "audio": speech, "seed": 3}
        with pipe.stream("a fox", **arguments) as stream:
            wanted = torch.cat([chunk.frames for chunk in stream]).numpy()
    assert np.abs(pixels.astype(float) - wanted).mean() < 20  # noise is hard to encode
    assert np.abs(pixels.astype(float) - wanted[::-1]).mean() > np.abs(pixels.astype(float) - wanted).mean() + 5
    quarters = [np.abs(part).mean() for part in np.split(heard[:48000], 4)]
    assert min(quarters[1], quarters[3]) > 5 * max(quarters[0], quarters[2])


def test_json_and_an_image_stream(image_folder: Path, tmp_path: Path) -> None:
    frames = tmp_path / "frames"
    frames.mkdir()
    for number, colour in enumerate(("teal", "red", "blue")):
        Image.new("RGB", (80, 70), colour).save(frames / f"{number}.png")
    flags = ("--steps", 2, "--strength", 1, "--height", 64, "--width", 64, "--fps", 5, "--devices", "cpu", "--json")
    result = run("a fox", "--model", image_folder, "--input", frames, *flags, "-o", tmp_path / "a.mkv")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["frames"], found["dropped"]) == (3, 0)
    assert found["seconds"] == pytest.approx(0.6)
    assert found["outputs"] == [str(tmp_path / "a.mkv")]
    pixels, times, heard = decoded(tmp_path / "a.mkv")
    assert pixels.shape == (3, 64, 64, 3)
    assert times == pytest.approx([0, 0.2, 0.4], abs=1e-3)
    assert not len(heard)


def test_a_video_is_generated_anew_frame_by_frame(image_folder: Path, tmp_path: Path) -> None:
    with av.open(str(tmp_path / "in.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for level in (0, 120, 240):
            image = np.full((64, 64, 3), level, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    flags = ("--steps", 2, "--strength", 0.5, "--devices", "cpu")
    result = run("a fox", "--model", image_folder, "--input", tmp_path / "in.mp4", *flags, "-o", tmp_path / "a.mp4")
    assert result.exit_code == 0, result.stderr
    pixels, times, _ = decoded(tmp_path / "a.mp4")
    assert times == pytest.approx([0, 1 / 8, 2 / 8], abs=1e-3)
    assert pixels.shape == (3, 64, 64, 3)
    oracle = quiet(DiffusionPipeline.from_pretrained(image_folder, safety_checker=None, feature_extractor=None))
    wanted = [anew(oracle, frame) for frame in decoded(tmp_path / "in.mp4")[0]]
    apart = [[np.abs(one - other).mean() for other in wanted] for one in pixels.astype(float)]
    assert [int(np.argmin(each)) for each in apart] == [0, 1, 2], apart
    assert max(min(each) for each in apart) < 20, apart  # noise is hard to encode


def anew(oracle: Any, frame: np.ndarray) -> np.ndarray:
    """A frame as plain diffusers makes it from an image, with the flags above and the seed of the command."""
    call = {"num_inference_steps": 2, "strength": 0.5, "generator": torch.Generator().manual_seed(0)}
    return np.array(oracle("a fox", image=Image.fromarray(frame), **call).images[0], float)


@pytest.mark.parametrize(("number", "code"), first_of([(signal.SIGINT, 0), (signal.SIGTERM, 143)]))
def test_a_stream_without_end_is_watched_on_two_pages_until_a_signal_and_what_came_is_saved(
    folder: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """What the pages are sent decodes to frames; a signal ends pages and stream, and nothing hangs."""
    target = tmp_path / "talk.webm"
    words = ["stream", "--model", folder, "--devices", "cpu:2", "--mjpeg", 0, "--ws", 0, "-o", target]
    command = [sys.executable, "-m", "patchpar", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        images, displayed = (line.split()[-1] for line in (process.stderr.readline(), process.stderr.readline()))
        with connect(displayed.replace("http", "ws") + "/video", open_timeout=60, close_timeout=0.5) as watcher:
            kind = json.loads(watcher.recv(120))
            received = b"".join(watcher.recv(60) for _ in range(20))
        with urllib.request.urlopen(f"{images}/images", timeout=60) as answer:
            seen = jpegs(answer)
            assert min(next(seen), next(seen)) > 0
        with urllib.request.urlopen(f"{displayed}/status", timeout=60) as answer:
            assert "frames/s, first frame after" in json.load(answer)["status"]
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "frames at " in out
    assert f"saved {target}" in out
    assert len(decoded(target)[0]) > 0
    assert list(tmp_path.iterdir()) == [target]
    assert kind["mime"].startswith('video/mp4; codecs="avc1')
    with av.open(io.BytesIO(received)) as container:
        times = [float(frame.time) for frame in container.decode(video=0)]
    assert len(times) >= 4
    assert np.diff(times) == pytest.approx([1 / 20] * (len(times) - 1), abs=2e-3)


def test_a_port_that_is_taken_is_refused_before_anything_is_started(folder: Path, image_folder: Path) -> None:
    frames = Path(__file__).parents[2] / "assets" / "figures"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for words in (("--model", folder, "--ws", port), ("--model", image_folder, "--input", frames, "--mjpeg", port)):
            result = run(*words, "--devices", "cpu:99")  # too many: it would be said if it came so far
            assert result.exit_code == 2
            assert f"127.0.0.1:{port} cannot be used: Address already in use" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the frames have no output: add --output talk.mp4, --mjpeg 8000 or --ws 8000"),
        (("--model", "m", "--ws", "70000"), "--ws 70000: it must be a number from 1 to 65535, or 0 for any free port"),
        (("--model", "m", "-o", "a.mp4", "--host", "::"), "--host ::: it goes with --mjpeg or --ws"),
        (("--model", "m", "-o", "a.gif"), "names no video format"),
        (("--model", "m", "-o", "a.mp4", "--seconds", "0"), "--seconds 0.0: it must be above 0"),
        (("--model", "m", "-o", "a.mp4", "--seconds", "inf"), "--seconds inf: it must be a finite number; for no end"),
        (("--input", ".", "-o", "a.mp4", "--strength", "3"), "--strength 3: it must be above 0 and at most 1"),
        (("--devices", "²", "--dry-run"), "'²'"),
        (("--model", "m", "-o", "a.mp4", "--fps", "0.00001"), "--fps 1e-05: it must be from 0.001 to 1000"),
        (("--model", "m", "-o", "a.mp4", "--seed", "-1"), "--seed -1: it must be from 0 to 18446744073709551615"),
        (("--input", ".", "-o", "a.mp4", "--seed", "-1"), "--seed -1: it must be from 0 to 9223372036854775807"),
        (("--model", "m", "-o", "a.mp4", "--audio-rate", "0"), "--audio-rate 0: it must be above 0"),
        (("--model", "m", "-o", "a.mp4", "--restarts", "-1"), "--restarts -1: it must be at least 0"),
        (("--input", ".", "-o", "a.mp4", "--restarts", "-1"), "--restarts -1: it must be at least 0"),
        (("--model", "m", "-o", "a.mp4", "--steps", "2"), "--steps is for streams with --input"),
        (
            ("--model", "m", "-o", "a.mp4", "--input", "f", "--audio", "a.wav"),
            "--audio is not for streams with --input",
        ),
        (("--model", "m", "-o", "a.mp4", "--input", "f", "--height", "64"), "--height and --width: give both or none"),
        (("--model", "m", "-o", "a.mp4", "--input", "none"), "--input none: there is no such folder or video"),
        (("--model", "m", "-o", "a.mp4", "--input", "."), "--input .: this folder has no images"),
        (("--model", "m", "-o", "a.mp4", "--input", "text.mp4"), "--input text.mp4 cannot be read as a video"),
        (("--model", "none", "-o", "a.mp4"), "'none' is no model"),
        (
            ("-o", "a.mp4", "--seconds", "1", "--lora", "~nobody-of-this-name/x"),
            "'~nobody-of-this-name/x' is no valid path",
        ),
        (("--audio", "page", "-o", "a.mp4"), "--audio page: the page that sends it is that of --ws: add --ws 8000"),
        (("--input", "page", "-o", "a.mp4"), "--input page: the page that sends it is that of --ws: add --ws 8000"),
        (("--late", "drop_oldest", "-o", "a.mp4"), "--late drop_oldest: it goes with --mjpeg or --ws"),
        (("--webrtc", "-o", "a.mp4"), "--webrtc: it is the page of --ws that plays so: add --ws 8000"),
        (("--audio", "a.wav", "--audio-rate", "8000", "-o", "a.mp4"), "are of raw samples: add --audio -"),
        (("--audio", "mic:none", "-o", "a.mp4"), "alsa none: "),
        (("--input", "camera:none", "-o", "a.mp4"), "v4l2 none: "),
        (("--model", "m", "-o", "a.mp4", "--costs", "step=1"), "--costs goes with --dry-run"),
        (("--model", "m", "--dry-run", "--input", "."), "leave out --input"),
    ],
)
def test_bad_use(words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.mp4").write_text("no film")
    result = run(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes would start all workers."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    journal = one_block(tmp_path / "a.jsonl", "embedded-face")
    for verb, *words in (
        ("stream", "--model", "none", "-o", tmp_path / "a.mp4"),
        ("stream", "--input", "none", "-o", tmp_path / "a.mp4"),
        ("replay", journal),
        ("fifo", "a fox", "--model", "none", "-o", tmp_path / "a.mp4"),
        ("app", "--model", "none"),
        ("tune", "--devices", "none"),
        ("doctor", "--model", "none"),
    ):
        result = CliRunner().invoke(app, [verb, *map(str, words)])
        assert result.exit_code == 2
        assert f"{verb} starts its own workers: start it without torchrun" in result.stderr


def test_what_becomes_of_late_blocks_is_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[StreamDelivery] = []

    def begun(*_: Any, delivery: StreamDelivery, **__: Any) -> Any:
        found.append(delivery)
        raise PlanError("far enough")

    monkeypatch.setattr(StreamingPipeline, "stream", begun)
    for words in ((), ("--late", "skip_to_live", "--restarts", 7)):
        assert "far enough" in run("--model", folder, "--ws", 0, "--devices", "cpu", *words).stderr
    assert [(each.output, each.restarts) for each in found] == [("block", 3), ("skip_to_live", 7)]


def test_restarts_of_an_image_stream_are_passed_on(
    image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int | None] = []

    def begun(*_: Any, restarts: int | None = None, **__: Any) -> Any:
        found.append(restarts)
        raise PlanError("far enough")

    monkeypatch.setattr(ImageStreamingPipeline, "stream", begun)
    Image.new("RGB", (64, 64)).save(tmp_path / "0.png")
    words = ("--model", image_folder, "--input", tmp_path, "--devices", "cpu", "-o", tmp_path / "a.mp4")
    for more in ((), ("--restarts", 7), ("--restarts", 0)):
        assert "far enough" in run("a fox", *words, *more).stderr
    assert found == [None, 7, 0]


def test_the_limits_of_flags_are_those_of_streams() -> None:
    assert get_args(Late) == get_args(Output)
    assert FPS == (config.LEAST_FPS, config.MOST_FPS)


def test_standard_input_is_read_without_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python aborts on exit where a thread that still reads holds the lock of a buffer."""
    read, write = os.pipe()
    with os.fdopen(write, "wb", 0) as writer, os.fdopen(read, "r") as text:
        monkeypatch.setattr(sys, "stdin", text)
        found = live_inputs._standard_input()
        assert isinstance(found, io.FileIO)
        writer.write(b"RIFF")
        assert found.read(100) == b"RIFF", "what there is"


def test_audio_comes_from_a_pipe_of_three_channels(folder: Path, tmp_path: Path) -> None:
    """The stream ends with it, and has its audio: at 7 kHz, silent and loud in turn."""
    loud_at = np.where(np.arange(7000) // 1750 % 2 == 1, tone(7000, 1.0), 0)
    speech = write_wav(tmp_path / "speech.wav", loud_at, 7000, 3)
    for words, data in (
        ((), speech.read_bytes()),
        (("--audio-rate", 7000), (loud_at * 32767).astype("<i2").tobytes()),
    ):
        flags = ("--model", folder, "--audio", "-", *words, "--devices", "cpu", "-o", tmp_path / "talk.mp4")
        result = CliRunner().invoke(app, ["stream", *map(str, flags)], input=data)
        assert result.exit_code == 0, result.stderr
        channels = "1 channel" if words else "3 channels"
        assert f"standard input: s16le, 7000 samples/s, {channels}" in result.stderr
        pixels, _, heard = decoded(tmp_path / "talk.mp4")
        assert len(pixels) == 23
        quarters = [np.abs(part).mean() for part in np.split(heard[:48000], 4)]
        assert min(quarters[1], quarters[3]) > 5 * max(quarters[0], quarters[2])


def test_audio_and_video_come_from_devices(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg's generators are opened as devices are. They end before the stream, which goes on and says so."""
    monkeypatch.setattr(
        "patchpar.media.capture_device.MICROPHONES", {sys.platform: (("lavfi", "sine=sample_rate=7000:d=0.2"),)}
    )
    monkeypatch.setattr(
        "patchpar.media.capture_device.CAMERAS", {sys.platform: (("lavfi", "color=red:size=32x24:duration=0.2"),)}
    )
    words = ("--audio", "mic", "--input", "camera", "--strength", 0.7, "--seconds", 1)
    result = run("--model", folder, *words, "--devices", "cpu", "-o", tmp_path / "talk.mp4")
    assert result.exit_code == 0, result.stderr
    assert "the microphone has stopped; the stream goes on with silence" in result.stderr
    assert "the camera has stopped; its last image stays" in result.stderr
    pixels, _, heard = decoded(tmp_path / "talk.mp4")
    assert len(pixels) == 23
    assert np.abs(heard[:9000]).mean() > 10 * np.abs(heard[14400:48000]).mean()


@pytest.mark.parametrize("facts", ["file", "scheduler"])
def test_a_model_of_the_hub_starts_from_a_video(facts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kind of model it is says stream.json, or the scheduler, before weights are downloaded."""
    folder = write_folder(tmp_path / "snapshot", hears=False)
    if facts == "scheduler":
        (folder / "stream.json").unlink()
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": SELF_FORCING}))
    asked: list[list[str]] = []

    def downloaded(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", downloaded)
    video = write_video(tmp_path / "video.mp4", 9)
    words = ("a fox", "--model", f"org/{facts}", "--input", video, "--strength", 0.7, "-o", tmp_path / "a.mp4")
    result = run(*words, "--devices", "cpu:99")  # which is looked at after the kind of model, and of no image model
    assert "between 1 and 16 CPU workers" in result.stderr
    assert not any("safetensors" in pattern for pattern in asked[0])
    if facts == "file":
        assert run(*words, "--devices", "cpu").exit_code == 0
        assert len(decoded(tmp_path / "a.mp4")[0]) >= 9


def write_video(path: Path, frames: int) -> Path:
    with av.open(str(path), "w") as container:
        track = container.add_stream("mpeg4", rate=20)
        track.width, track.height = 24, 16
        for number in range(frames):
            container.mux(
                track.encode(av.VideoFrame.from_ndarray(np.full((16, 24, 3), 20 * number, np.uint8), "rgb24"))
            )
        container.mux(track.encode())
    return path


def test_what_a_model_starts_from_is_asked_for_before_it_is_loaded(tmp_path: Path) -> None:
    folder, video = write_folder(tmp_path / "model", hears=False), write_video(tmp_path / "video.mp4", 3)
    common = ("-o", tmp_path / "a.mp4", "--devices", "cpu:99", "--model", folder)  # which is looked at afterwards
    assert "nothing of it is left: add --strength, such as 0.7" in run(*common, "--input", video).stderr
    stream = json.loads((folder / "stream.json").read_text())
    (folder / "stream.json").write_text(json.dumps({**stream, "sigmas": [0.7, 0.4, 0.0]}))
    assert "starts at noise level 0.7: add --input" in " ".join(run(*common).stderr.split())
    (folder / "stream.json").write_text(json.dumps(stream))
    network = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps({**network, "in_channels": 36}))
    assert "this model starts from an image: add --reference" in run(*common).stderr
    (folder / "stream.json").unlink()
    (folder / "scheduler" / "scheduler_config.json").unlink()
    for way in ("`patchpar convert` makes a folder", "for `patchpar fifo`", "takes --input"):
        assert way in " ".join(run(*common).stderr.replace("│", " ").split())


def test_audio_and_face_are_looked_at_before_anything_is_started(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_text("no sound")
    mute = write_folder(tmp_path / "mute", hears=False)
    common = ("-o", tmp_path / "a.mp4", "--devices", "cpu:99")  # too many: it would be said if it came so far
    for words, message in (
        (("--model", folder, "--audio", tmp_path / "a.wav"), "cannot be read as audio"),
        (("--model", folder, "--reference", tmp_path / "a.wav"), "cannot be read as an image"),
        (("--model", mute, "--audio", tmp_path / "a.wav"), "takes no audio"),
    ):
        result = run(*words, *common)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_speech_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder. A file of that name is named by its path."""
    monkeypatch.chdir(tmp_path)
    write_wav(tmp_path / "embedded", tone(16000, 0.5), 16000)
    hears: Any = SimpleNamespace(rate=16000)
    found = [_audio(StreamFlags(audio=name), hears) for name in ("embedded", "./embedded")]
    assert [round(len(audio.samples) / audio.rate, 1) for audio in found] == [6.0, 0.5]


def test_a_stream_that_was_taken_down_is_made_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a journal of which a line was changed is told from it, with the block from which it differs.

    What is written to the file is bit-equal. What is read from it is not always: x264's rate control (its macroblock
    tree, with AVX-512) may quantise a frame a little finer or coarser where a machine is busy.
    """
    written: dict[Path, list[np.ndarray]] = {}

    class Noted(video_file.StreamVideoFile):
        def show(self, frames_FHWC: torch.Tensor, pts: float, audio_N: torch.Tensor | None) -> None:
            written.setdefault(self.path, []).append(frames_FHWC.numpy().copy())
            super().show(frames_FHWC, pts, audio_N)

    monkeypatch.setattr(video_file, "StreamVideoFile", Noted)
    journal, common = tmp_path / "session.jsonl", ("--devices", "cpu", "--model", folder)
    words = ("a fox", "--seconds", 0.5, "--record", journal, *common)
    result = run(*words, "-o", tmp_path / "a.mp4")
    assert result.exit_code == 0, result.stderr
    assert f"saved {journal}" in result.stdout

    def again(*more: object) -> Any:
        return CliRunner().invoke(app, ["replay", *map(str, (journal, *common, *more))])

    result = again("-o", tmp_path / "b.mp4")
    assert result.exit_code == 0, result.stderr
    assert "3 blocks, every frame equal to the recording" in result.stdout
    first, second = map(np.concatenate, written.values())
    assert len(first) == 11
    assert np.array_equal(first, second)
    one, other = (decoded(tmp_path / name)[0].astype(float) for name in ("a.mp4", "b.mp4"))
    assert np.abs(one - other).mean() < 5
    assert np.abs(one - other[::-1]).mean() > 10, "frames in another order differ by more"
    head, *lines = journal.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "updates": [{"kind": "PromptUpdate", "text": "a hen"}]})
    journal.write_text("\n".join([head, *lines]) + "\n")
    result = again("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["differing"] == [1, 2]
    assert "2 of 3 blocks differ from the recording, from block 1 on" in result.stderr
    assert result.stderr.count("it was recorded with") == 1, "its versions are a list"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_recording_that_ends_before_the_stream_is_not_among_the_files(
    as_json: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The video is whole; what the recording has can be replayed."""
    written = StreamJournal._write

    def write(self: StreamJournal, line: str) -> bool:
        if self.blocks == 2:
            raise OSError(28, "No space left on device")
        return written(self, line)

    monkeypatch.setattr(StreamJournal, "_write", write)
    journal, video = tmp_path / "session.jsonl", tmp_path / "a.mp4"
    words = ("a fox", "--seconds", 0.5, "--record", journal, "-o", video, "--devices", "cpu", "--model", folder)
    result = run(*words, *(["--json"] if as_json else []))
    assert result.exit_code == 1
    assert f"{journal} ends after 2 blocks: [Errno 28] No space left on device" in result.stderr
    if as_json:
        assert json.loads(result.stdout)["outputs"] == [str(video)]
    else:
        assert [line for line in result.stdout.splitlines() if "saved" in line] == [f"saved {video}"]
    assert len(StreamRecording.read(journal).blocks) == 2


def one_block(path: Path, model: str) -> Path:
    """A journal of that model, with a block."""
    journal = StreamJournal(path, replace(origin(), model=model))
    journal.note(*arrived(0))
    journal.close()
    return path


@pytest.mark.parametrize(("answer", "loaded"), [(None, False), ("n", False), ("y", True)])
def test_a_journal_does_not_choose_what_is_loaded(
    answer: str | None, loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked about by name, where there is somebody to ask; a shipped model and one that is named need no word."""
    asked: list[str] = []

    def load(model: str, **options: Any) -> Any:
        asked.append(str(model))
        raise PlanError("far enough")

    monkeypatch.setattr("patchpar.StreamingPipeline.from_pretrained", load)
    monkeypatch.setattr("patchpar.cli.stream.replay._can_be_asked", lambda: answer is not None)
    journal = one_block(tmp_path / "a.jsonl", "somebody/model")
    result = CliRunner().invoke(app, ["replay", str(journal)], input=answer)
    assert result.exit_code == 2
    assert ("far enough" in result.stderr) == loaded
    assert ("pass --model 'somebody/model'" in result.stderr) != loaded
    assert ("Load that? [y/N]" in result.stderr) == (answer is not None)
    assert asked == ["somebody/model"] * loaded
    asked.clear()
    CliRunner().invoke(app, ["replay", str(journal), "--model", "elsewhere"])
    CliRunner().invoke(app, ["replay", str(one_block(tmp_path / "b.jsonl", "embedded-face"))])
    CliRunner().invoke(app, ["replay", str(one_block(tmp_path / "c.jsonl", str(embedded_model("embedded-face"))))])
    assert asked == ["elsewhere", "embedded-face", "embedded-face"]


# --- what would be -------------------------------------------------------------------------------------------------


def test_a_dry_run_says_who_would_do_what_and_how_fast(folder: Path) -> None:
    words = ("--model", folder, "--dry-run", "--devices", 3)
    plain = run(*words).stdout
    assert plain.splitlines()[0] == "2 steps on 3 ranks (rank 0: step 0; rank 1: step 1; rank 2: decode)"
    assert "4 frames per block: for 20 frames/s, each stage may take at most 0.200 s" in plain
    assert "add --costs" in plain
    fast = json.loads(run(*words, "--costs", "step=0.1,decode=0.05", "--json").stdout)
    assert fast["forecast"]["fps"] == pytest.approx(40, rel=0.03)
    assert fast["forecast"]["first_frame"] == pytest.approx(0.25, rel=0.03)
    assert fast["forecast"]["keeps_up"]
    slow = run(*words, "--costs", "step=0.4,decode=0.05").stdout
    assert "this does not keep up with 20 frames/s" in slow


def test_a_dry_run_has_the_plan_of_the_stream(folder: Path, tmp_path: Path) -> None:
    """Of devices that it leaves it says what they are for."""
    model = ("--model", folder)
    for words, spare in ((("--devices", "cpu:4"), 1), (("--devices", "cpu:4", "--inner", 2), 0)):
        forecast = json.loads(run(*model, *words, "--dry-run", "--json").stdout)
        streamed = json.loads(run(*model, *words, "--seconds", 0.1, "-o", tmp_path / "a.mp4", "--json").stdout)
        assert (streamed["plan"], forecast["spare_devices"]) == (forecast["plan"], spare)
    more = run(*model, "--dry-run", "--devices", 9).stdout
    assert "devices to spare, for one that fails: 6; with --inner 2 ranks would share each step" in more
    assert "devices to spare" not in run(*model, "--dry-run", "--devices", 3).stdout


@pytest.mark.parametrize(
    ("history", "seconds"),
    [("noisy", 0.1), ("clean", 2 * 0.1 + 0.1), ("recompute", 2 * 0.1 + (3 - 1) * 0.1 + 0.05)],
)
def test_a_forecast_counts_all_passes_of_a_block(history: str, seconds: float, folder: Path, tmp_path: Path) -> None:
    """Of two steps and a window of three blocks; the last of these histories decodes on the rank that denoises."""
    model = shutil.copytree(folder, tmp_path / "model")
    facts = json.loads((model / "stream.json").read_text())
    facts["blocks"]["history"] = history
    (model / "stream.json").write_text(json.dumps(facts))
    words = ("--model", model, "--dry-run", "--devices", 3, "--costs", "step=0.1,decode=0.05", "--json")
    assert json.loads(run(*words).stdout)["forecast"]["fps"] == pytest.approx(4 / seconds, rel=0.03)


def test_a_forecast_needs_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a model of the hub would be gigabytes."""
    folder = write_folder(tmp_path / "whole")

    def downloaded(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        for pattern in ignore_patterns:
            for file in folder.glob(pattern):
                file.unlink()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", downloaded)
    result = run("--model", "org/forecast", "--dry-run", "--devices", 3)
    assert result.stdout.startswith("2 steps on 3 ranks"), result.stderr
    left = [path for part in ("transformer", "vae", "text_encoder") for path in (folder / part).glob("*.safetensors")]
    assert [path.name for path in left] == []


def test_ranks_that_cannot_share_a_step_are_refused_before_any_starts(folder: Path, tmp_path: Path) -> None:
    for words, message in (
        (("--devices", 9, "--inner", 3, "--dry-run"), "this transformer has 2: use at most inner=2"),
        (("--devices", "cpu:3", "--inner", 2, "-o", tmp_path / "a.mp4"), "4 in all, and there are 3"),
        (("--inner", 0, "--dry-run"), "--inner 0: it must be above 0"),
    ):
        refused = run("--model", folder, *words)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.replace("│", " ").split())


def test_ranks_that_share_a_step_are_priced_by_the_link_between_them(folder: Path) -> None:
    words = ("--model", folder, "--dry-run", "--devices", 5, "--inner", 2)
    assert "ranks that share a step: each sends " in run(*words).stdout
    refused = run(*words, "--costs", "step=0.1,decode=0.05")
    assert refused.exit_code == 2
    assert "add the rate between them to --costs" in " ".join(refused.stderr.replace("│", " ").split())
    found = json.loads(run(*words, "--json").stdout)["bytes_exchanged"]
    text = json.loads((folder / "transformer" / "config.json").read_text())
    width = text["num_attention_heads"] * text["attention_head_dim"]
    stream, vae = (json.loads((folder / name).read_text()) for name in ("stream.json", "vae/config.json"))
    area = math.prod(stream[side] // vae["scale_factor_spatial"] for side in ("height", "width"))
    tokens = stream["blocks"]["frames"] * area // math.prod(text["patch_size"])
    assert found == text["num_layers"] * 4 * tokens * width * 2 / 4
    slow, fast = (
        json.loads(run(*words, "--json", "--costs", f"step=0.1,decode=0.05,rate={found / seconds / 1e9}").stdout)
        for seconds in (0.15, 0.01)
    )
    assert slow["forecast"]["fps"] == pytest.approx(4 / 0.2, rel=0.03)
    assert fast["forecast"]["fps"] == pytest.approx(4 / 0.06, rel=0.03)


@pytest.mark.parametrize(
    "text",
    [
        "step",
        "step=a,decode=1",
        "step=1",
        "step=1,decode=1,colour=2",
        "step=1,decode=1,rate=0",
        "step=1,decode=1,step=2",
    ],
)
def test_costs_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match=f"--costs {text}"):
        parse_costs(text)


# --- while it runs -------------------------------------------------------------------------------------------------


def test_the_meter() -> None:
    now = [10.0]
    meter = ProgressMeter(lambda: now[0])
    assert (meter.fps, meter.first_frame, str(meter)) == (None, None, "no frame came out")
    for gap in (0.5, 1.0, 1.0, 1.0, 1.0, 0.5):
        now[0] += gap
        meter.add(10, under_way=3)
    assert meter.first_frame == 0.5
    assert meter.fps == pytest.approx(50 / 4.5)
    assert meter.line("running", 2, 65.0) == "1:05.0, 12.0 frames/s, first frame after 0.50 s, 2 in flight".replace(
        "12.0", f"{30 / 2.5:.1f}"
    )
    assert meter.line("degraded", 2, 65.0).endswith(", degraded")
    assert str(meter) == "60 frames at 11.1 frames/s, the first after 0.50 s"


def test_live_parts_come_by_the_clock() -> None:
    """And after one that was late the others keep their distance from it."""
    now, arrived = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda gap: now.__setitem__(0, now[0] + gap))

    def parts() -> Iterator[TimedFrames]:
        for number, cost in enumerate((0.0, 0.01, 0.01, 1.0, 0.01)):
            now[0] += cost
            yield TimedFrames(frames=None, pts=number / 4, audio=None, status="running")

    for _ in paced(parts(), clock):
        arrived.append(now[0] - 100)
    assert arrived == pytest.approx([0, 0.25, 0.5, 1.5, 1.75])


class Screen:
    def __init__(self) -> None:
        self.displayed: list[float] = []

    def show(self, frames: Any, pts: float, audio: Any) -> None:
        self.displayed.append(pts)


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), SystemExit(143), RuntimeError("a rank is gone")])
def test_what_has_come_out_is_kept_whatever_ends_a_stream(fault: BaseException) -> None:
    def parts() -> Iterator[TimedFrames]:
        frames = torch.zeros(4, 2, 2, 3)
        yield TimedFrames(frames=frames, pts=0.0, audio=None, status="running")
        yield TimedFrames(frames=None, pts=0.15, audio=None, status="degraded")
        yield TimedFrames(frames=frames, pts=0.2, audio=None, status="running")
        raise fault

    screen, message = Screen(), []
    session = SimpleNamespace(in_flight=2, dropped=0)
    ending = show_all(parts(), session, [screen], ProgressMeter(), message.append, 20)
    assert screen.displayed == [0.0, 0.2]
    assert ending.seconds == 0.4
    assert ending.code == {KeyboardInterrupt: 130, SystemExit: 143, RuntimeError: 0}[type(fault)]
    assert ending.error is (None if ending.code else fault)
    assert ["degraded" in line for line in message] == [False, True, False]


def test_an_error_before_the_first_frame_leaves_no_video(tmp_path: Path) -> None:
    def parts() -> Iterator[TimedFrames]:
        raise RuntimeError("out of memory")
        yield

    with pytest.raises(RuntimeError), video_file.video_at(tmp_path / "a.mp4", 20, None) as decoded:
        show_all(parts(), SimpleNamespace(in_flight=0, dropped=0), [decoded], ProgressMeter(), print, 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"speaker": ["a.wav"]}, "--speaker a.wav: it has to be AUDIO:MASK, and there is no file"),
        ({"speaker": [f"{__file__}:no.png"]}, "there is no file 'no.png'"),
        ({"speaker": [f"{__file__}:{__file__}"], "audio": "embedded"}, "--audio is of one speaker"),
        ({"speaker": [f"{__file__}:{__file__}"], "record": Path("a.jsonl")}, "--record holds neither"),
        ({"pose": Path("no.mp4")}, "--pose no.mp4: there is no such file"),
        ({"pose": Path(__file__), "record": Path("a.jsonl")}, "--record holds neither"),
        ({"input": "no.mp4", "model": "embedded-face"}, "embedded-face generates video, and there is no such file"),
        (
            {"input": __file__, "model": "embedded-face", "record": Path("a.jsonl")},
            "not hold the frames of --input",
        ),
    ],
)
def test_files_of_a_stream_that_do_not_go_together(words: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        StreamFlags(**words, output=Path("a.mp4")).check()


@pytest.mark.parametrize(
    ("words", "model"), [({}, "embedded-face"), ({"input": Path("frames")}, "embedded"), ({"model": "mine"}, "mine")]
)
def test_what_streams_where_no_model_is_named(words: dict[str, Any], model: str) -> None:
    assert StreamFlags(**words).weights == model


KILLED = """
import sys, time, torch
from pathlib import Path
from patchpar.cli.video_file import video_at
with video_at(Path(sys.argv[1]), 20, 16000, is_endless=sys.argv[2] == "endless") as video:
    for block in range(1000):
        video.show(torch.full((4, 64, 64, 3), block % 200, dtype=torch.uint8), block / 5, torch.zeros(3200))
        print(block, flush=True)
        time.sleep(0.001)
"""


@pytest.mark.parametrize("suffix", first_of(["mp4", "mkv", "webm"], "mp4"))
def test_a_video_without_end_can_be_played_after_the_process_is_killed(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    blocks = killed_after(40, path, "endless")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    images, times, samples = decoded(path)
    assert 4 * blocks - 20 <= len(images) <= 4 * blocks + 8, "all but the last second"
    assert times == sorted(times)
    assert len(samples) / 48000 > blocks / 5 - 1.5
    assert abs(int(images[40].mean()) - 10) <= 3


def test_a_video_of_a_known_length_is_whole_or_is_not_there(tmp_path: Path) -> None:
    """The control: what a killed process leaves of it is under another name, and cannot be played."""
    killed_after(40, tmp_path / "a.mp4", "whole")
    (left,) = tmp_path.iterdir()
    assert left.name != "a.mp4"
    with pytest.raises(Exception, match="Invalid data"):
        decoded(left)


def noise_parts(blocks: int) -> Iterator[TimedFrames]:
    """Frames that take some 15 kB each."""
    for block in range(blocks):
        frames = torch.randint(0, 256, (4, 128, 128, 3), dtype=torch.uint8)
        yield TimedFrames(frames=frames, pts=block / 5, audio=None, status="running")


def test_a_full_disk_ends_a_stream_that_nobody_else_watches(tmp_path: Path) -> None:
    """The file can be played until its last fragment, which is not whole, and the sentence names the file."""
    path = tmp_path / "a.mp4"
    session, meter = SimpleNamespace(in_flight=0, dropped=0), ProgressMeter()
    with small_disk(), video_file.video_at(path, 20, None, is_endless=True) as video:
        ending = show_all(noise_parts(100), session, [video], meter, lambda line: None, 20)
    assert isinstance(ending.error, PatchparError)
    assert str(ending.error).startswith(f"cannot write {path}: File too large; free some space there")
    played = 0
    with av.open(str(path)) as container, suppress(av.FFmpegError):
        for _ in container.decode(video=0):
            played += 1
    assert 12 <= played <= meter.frames + 4 < 400


@pytest.mark.parametrize("is_endless", [True, False])
def test_a_full_disk_ends_no_stream_that_others_watch(
    is_endless: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A video of a known length, which is whole or is not there, is not there."""
    path, screen, ended = tmp_path / "a.mp4", Screen(), list[StreamEnding]()
    session = SimpleNamespace(in_flight=0, dropped=0)
    with suppress(PatchparError), small_disk(), video_file.video_at(path, 20, None, is_endless=is_endless) as video:
        ended.append(show_all(noise_parts(40), session, [video, screen], ProgressMeter(), lambda line: None, 20))
    assert len(screen.displayed) == 40
    (ending,) = ended
    assert isinstance(ending.error, PatchparError)
    assert ending.seconds == 8
    outputs = FrameOutputs(request=StreamFlags(), fps=20, rate=None, live=(), videos=(video,))
    assert outputs.saved == []
    assert replace(outputs, videos=(video_file.StreamVideoFile(path, path, 20, None),)).saved == [path]
    assert capsys.readouterr().err == f"{ending.error}. The stream goes on without it\n"
    assert path.exists() == is_endless


def killed_after(blocks: int, path: Path, kind: str) -> int:
    """Write a video in another process and kill it; returns how many blocks it had written at least."""
    words = [sys.executable, "-c", KILLED, str(path), kind]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < blocks:
            pass
        process.kill()
        return 1 + max([blocks, *map(int, process.stdout.read().split())])
