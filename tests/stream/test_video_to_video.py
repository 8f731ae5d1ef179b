"""Streams that start from a video: its latents at the first step's noise level, block by block."""

from __future__ import annotations

import io
import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from patchpar.cli.stream.images import ImageFrames
from patchpar.errors import PlanError
from patchpar.media.video_encoder import VideoFormat, VideoWriter
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.decoder import WanDecoder, WanEncoder
from patchpar.models.streaming.flow_schedule import FlowSchedule, keyed_noise
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.delivery import StreamDelivery
from patchpar.stream.messages import BeginBlock
from patchpar.stream.session import StreamSession
from patchpar.stream.video_source import FrameSources, LiveVideo, VideoSource, frames_from
from tests.stream.running import Script, differing, pipelined, serial
from tests.stream.test_live_inputs import until
from tests.stream.test_session import COURSE, FORMAT, Ranks
from tests.stream.tiny import COLUMNS, FRAMES, ROWS, STREAM, speech, stream, vae, write_folder

HEIGHT, WIDTH, PER_LATENT = 2 * ROWS, 2 * COLUMNS, 2
BLOCKS = 4
COUNT = 1 + PER_LATENT * (BLOCKS * FRAMES - 1)
FINE = {"qmin": "1", "qmax": "1"}


def images(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (COUNT, HEIGHT, WIDTH, 3), dtype=torch.uint8, generator=generator)


def first_frame(block: int) -> int:
    return max(0, 1 + PER_LATENT * (block * FRAMES - 1))


def frames_of(block: int) -> int:
    return first_frame(block + 1) - first_frame(block)


def scaled(x_FHWC: Tensor) -> Tensor:
    return x_FHWC.float().permute(0, 3, 1, 2) / 127.5 - 1


@torch.no_grad()
def test_latents_block_by_block_are_those_of_the_whole_video() -> None:
    """By diffusers' own encoder, all at once, as far as it goes: it takes 4 images at a time and leaves the rest."""
    net, video = vae(), scaled(images())
    whole = net.encode(video.transpose(0, 1)[None]).latent_dist.mode()
    wanted = WanDecoder(net).normalized(whole)
    encoder = WanEncoder(WanDecoder(net))
    blocks = [video[first_frame(b) : first_frame(b + 1)] for b in range(BLOCKS)]
    found = torch.cat([encoder.encode(block, FRAMES) for block in blocks], 2)
    assert wanted.shape[2] == BLOCKS * FRAMES - 1
    assert float((found[:, :, : wanted.shape[2]] - wanted).abs().max()) < 1e-5
    alone = torch.cat([WanEncoder(WanDecoder(net)).encode(block, FRAMES) for block in blocks], 2)
    assert alone.shape == found.shape
    assert float((alone - found).abs().max()) > 1e-2, "the control: without the features of the block before"


@torch.no_grad()
def test_with_as_many_latent_frames_as_images_no_image_is_encoded_twice() -> None:
    torch.manual_seed(2)
    sizes: dict[str, Any] = {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1], "num_res_blocks": 0}
    factors: dict[str, Any] = {"scale_factor_temporal": 1, "scale_factor_spatial": 2}
    net = AutoencoderKLWan(**sizes, **factors, temperal_downsample=[False]).eval()
    video = scaled(images())[:5]
    wanted = WanDecoder(net).normalized(net.encode(video.transpose(0, 1)[None]).latent_dist.mode())
    encoder = WanEncoder(WanDecoder(net))
    found = torch.cat([encoder.encode(video[:3], 3), encoder.encode(video[3:], 2)], 2)
    assert float((found - wanted).abs().max()) < 1e-5


@torch.no_grad()
def test_a_block_that_is_begun_again_is_encoded_behind_no_later_one() -> None:
    """As after a rank has died: its latents are those of a rank that begins there."""
    model, blocks = made(), [images()[first_frame(b) : first_frame(b + 1)] for b in range(3)]
    noise = model.begin(1, (speech(1),))

    def begun(model: Any, *numbers: int) -> Tensor:
        return [model.noised(number, noise, blocks[number])[0] for number in numbers][-1]

    onward = begun(model, 0, 1)
    again = begun(model, 2, 1)
    assert torch.equal(again, begun(made(), 1))
    assert torch.equal(begun(model, 2), begun(made(), 1, 2)), "and goes on from there"
    assert not torch.equal(onward, again), "the control: what came before matters"


class FromVideo(Script):
    """Orders with the frames of a video."""

    def order(self, block: int, patience: float) -> Any:
        order = super().order(block, patience)
        if not isinstance(order, BeginBlock):
            return order
        return replace(order, frames=images()[first_frame(block) : first_frame(block + 1)])


def made() -> Any:
    model = stream(2)
    model._schedule = FlowSchedule.shifted(2).begun_at(0.6)
    return model


@pytest.mark.parametrize("plan", [StreamPlan.even(2, 1), StreamPlan.even(2, 3)], ids=str)
def test_a_stream_from_a_video_is_that_of_one_loop(plan: StreamPlan) -> None:
    """The first payload: (1 - s) latents + s noise, at noise level s of the first step; the rest as ever."""
    oracle = made()
    encoder = WanEncoder(WanDecoder(vae()))
    begin = oracle.begin

    def begun(block: int, inputs: Any) -> Any:
        noise, *rest = begin(block, inputs)
        video = scaled(images()[first_frame(block) : first_frame(block + 1)])
        with torch.no_grad():
            return 0.4 * encoder.encode(video, FRAMES) + 0.6 * keyed_noise(7, block, 0, tuple(noise.shape)), *rest

    oracle.begin = begun
    wanted = serial(oracle, {}, BLOCKS)
    outcome, _ = pipelined(made, plan, FromVideo({}, BLOCKS))
    assert max(float((a - b).abs().max()) for (a, _), (b, _) in zip(outcome, wanted, strict=True)) < 1e-5
    assert differing(outcome, pipelined(made, StreamPlan.even(2, 2), FromVideo({}, BLOCKS))[0]) == []
    noise, _ = pipelined(made, plan, Script({}, BLOCKS))
    assert differing(outcome, noise) == list(range(BLOCKS)), "the control: the video matters"


def test_a_level_scales_the_steps() -> None:
    schedule = FlowSchedule(sigmas=(1.0, 0.5, 0.0), sampler="renoise")
    assert schedule.begun_at(0.6).sigmas == (0.6, 0.3, 0.0)
    assert schedule.begun_at(None) is schedule
    wrong: Any
    for wrong in (0.0, 1.1, -1.0, True, "half"):
        with pytest.raises(PlanError, match=f"strength={wrong!r}: it must be above 0, and at most 1"):
            schedule.begun_at(wrong)


def write_video(path: Path, fps: int, count: int, codec: str = "libx264", options: Any = None, **form: str) -> Path:
    """Frame n has brightness 10 n."""
    with av.open(str(path), "w", **form) as container:
        track: Any = container.add_stream(codec, rate=Fraction(fps), options=options or {"crf": "1"})
        track.width, track.height, track.pix_fmt = 64, 48, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * number, np.uint8), format="rgb24")
            container.mux(track.encode(frame))
        container.mux(track.encode())
    return path


def test_a_file_at_the_rate_of_the_model(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", fps=10, count=8)
    for fps, expected in ((10, list(range(8))), (20, [n // 2 for n in range(15)]), (5, [0, 2, 4, 6, 7])):
        found = shades(path, fps)
        assert found[: len(expected)] == expected[: len(found)], fps
        assert abs(len(found) - len(expected)) <= 1
    (tmp_path / "b.mp4").write_bytes(b"no video")
    for video, message in (
        (tmp_path / "none.mp4", "there is no such file"),
        (tmp_path / "b.mp4", "cannot be read"),
        (3, "video=3: give a file, or images"),
    ):
        with pytest.raises(PlanError, match=message):
            list(frames_from(video, 20, HEIGHT, WIDTH))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="it has no frames"):
        VideoSource(iter([]), frames_of)


def shades(video: Any, fps: float) -> list[int]:
    return [round(float(frame.float().mean()) / 10) for frame in frames_from(video, fps, HEIGHT, WIDTH)]


def test_a_file_without_times_is_shown_at_its_rate(tmp_path: Path) -> None:
    """Raw H.264: none of its frames says when it is shown."""
    path = write_video(tmp_path / "a.h264", fps=10, count=8, format="h264")
    with av.open(str(path)) as container:
        assert {frame.time for frame in container.decode(video=0)} == {None}
    assert shades(path, 10) == list(range(8))
    assert shades(path, 5) == [0, 2, 4, 6]
    assert ImageFrames.of(path, None).fps == 10


@pytest.mark.parametrize(("codec", "options"), [("libx264", None), ("mpeg4", {"bf": "2", **FINE}), ("mjpeg", FINE)])
def test_frames_of_avi_are_shown_in_their_order(codec: str, options: dict[str, str], tmp_path: Path) -> None:
    """AVI has no times of frames that are decoded out of their order, as with B-frames, and FFmpeg invents some."""
    path = write_video(tmp_path / "a.avi", fps=10, count=8, codec=codec, options=options)
    assert shades(path, 10) == list(range(8))
    assert shades(path, 5) == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("suffix", "size_at", "unknown"), [("mkv", 44, b"\x01" + 7 * b"\xff"), ("avi", 4, 4 * b"\xff")]
)
def test_a_file_that_was_cut_off_is_refused(suffix: str, size_at: int, unknown: bytes, tmp_path: Path) -> None:
    """FFmpeg reads what is left as if it were all. The controls: the whole file, and one that states no length."""
    path = write_video(tmp_path / f"a.{suffix}", fps=10, count=8)
    data = path.read_bytes()
    assert len(shades(path, 10)) == len(shades(io.BytesIO(data), 10)) == 8
    cut = data[: len(data) - 100]
    path.write_bytes(cut)
    with av.open(str(path)) as container:
        assert list(container.decode(video=0)), "no error"
    for video in (path, io.BytesIO(cut)):
        with pytest.raises(
            PlanError, match=rf"cannot be read: it was cut off, and has {len(cut)} of {len(data)} bytes"
        ):
            next(frames_from(video, 10, HEIGHT, WIDTH))
    with pytest.raises(PlanError, match=r"it was cut off"):
        ImageFrames.of(path, None)
    path.write_bytes(cut[:size_at] + unknown + cut[size_at + len(unknown) :])
    assert shades(path, 10)


def test_a_file_that_is_cut_off_while_it_is_read_ends_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.mkv"
    writer = VideoWriter(str(path), VideoFormat(fps=10, height=64, width=64, container="matroska"))
    writer.add(torch.randint(0, 256, (50, 64, 64, 3), dtype=torch.uint8), 0.0)
    writer.close()
    frames = frames_from(path, 10, HEIGHT, WIDTH)
    next(frames)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(PlanError, match="it was cut off"):
        list(frames)


def test_the_last_frame_of_a_file_is_shown_as_long_as_it_says(tmp_path: Path) -> None:
    """Not for the time of one frame of the stream only."""
    path = write_video(tmp_path / "a.mp4", fps=2, count=3)
    assert shades(path, 10) == [0] * 5 + [1] * 5 + [2] * 5
    assert shades(path, 1) == [0, 2]


def test_pixels_of_a_file_are_square(tmp_path: Path) -> None:
    """A disc in a file of pixels that are twice as wide as high is shown as wide as high."""
    values = np.zeros((48, 64, 3), np.uint8)
    rows, columns = np.mgrid[:48, :64]
    values[(rows - 24) ** 2 + (2 * (columns - 32)) ** 2 < 16**2] = 255
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        track: Any = container.add_stream("libx264", rate=Fraction(4), options={"crf": "1"})
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        track.codec_context.sample_aspect_ratio = Fraction(2)
        container.mux(track.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(track.encode())
    whole = np.asarray(next(iter(ImageFrames.of(tmp_path / "a.mp4", None))))
    assert whole.shape == (48, 128, 3)
    for frame in (whole, np.asarray(next(frames_from(tmp_path / "a.mp4", 4, 48, 48)))):
        disc = frame.mean(2) > 128
        assert disc.any(0).sum() == pytest.approx(disc.any(1).sum(), abs=2)


def test_frames_of_a_file_are_upright(tmp_path: Path) -> None:
    """Telephones video as they are held, and say how to turn it: here the left half is white, and comes out on top."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        track: Any = container.add_stream("libx264", rate=Fraction(4))
        track.width, track.height, track.pix_fmt = 64, 48, "yuv420p"
        values = np.zeros((48, 64, 3), np.uint8)
        values[:, :32] = 255
        container.mux(track.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(track.encode())
    turned = quarter_turn(tmp_path / "a.mp4")
    for frame in (next(frames_from(turned, 4, 64, 48)), np.asarray(next(iter(ImageFrames.of(turned, None))))):
        assert tuple(frame.shape) == (64, 48, 3)
        top, bottom = (np.asarray(frame)[rows].mean() for rows in (slice(0, 24), slice(40, 64)))
        assert (round(top / 255), round(bottom / 255)) == (1, 0)


def quarter_turn(path: Path) -> Path:
    """Have an MP4 file say that it is shown a quarter turn clockwise (ISO 14496-12, 8.3.2)."""
    data = bytearray(path.read_bytes())
    matrix = data.index(b"tkhd") + 4 + 40
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def test_the_last_block_is_filled_up() -> None:
    def six() -> Iterator[Tensor]:
        for number in range(6):
            yield torch.full((2, 2, 3), number, dtype=torch.uint8)

    source = VideoSource(six(), frames_of)
    source.begin(lambda: None)
    until(lambda: source.is_here(0))
    assert [int(frame[0, 0, 0]) for frame in source.take(0)] == [0, 1, 2]
    assert not source.is_over(1)
    until(lambda: source.is_here(1))
    assert [int(frame[0, 0, 0]) for frame in source.take(1)] == [3, 4, 5, 5]
    until(lambda: source.is_over(2))


def test_a_video_whose_end_is_noticed_between_two_questions_has_no_empty_block() -> None:
    """Its thread may find the end after a block was found not to be the last, and before its frames are asked for."""
    read_on = threading.Event()

    def three() -> Iterator[Tensor]:
        yield from torch.zeros(3, 2, 2, 3, dtype=torch.uint8)
        assert read_on.wait(10)

    source, ended = VideoSource(three(), frames_of), threading.Event()
    source.begin(lambda: ended.set() if source.is_over(1) else None)
    until(lambda: source.is_here(0))
    source.take(0)
    assert not source.is_over(1)
    read_on.set()
    assert ended.wait(10), "the driver looks again"
    assert not source.is_here(1), "no block begins"


def test_a_video_is_read_two_blocks_ahead_and_no_further() -> None:
    read = list[int]()

    def endless() -> Iterator[Tensor]:
        while True:
            read.append(len(read))
            yield torch.zeros(2, 2, 3, dtype=torch.uint8)

    source = VideoSource(endless(), frames_of)
    source.begin(lambda: None)
    for block in range(5):
        until(lambda block=block: source.is_here(block))  # type: ignore[misc]
        source.take(block)
    until(lambda: len(read) >= first_frame(5) + 2 * frames_of(1))
    time.sleep(0.05)
    assert len(read) <= first_frame(5) + 2 * frames_of(1) + 1, "one more than wait"
    source.close()
    until(lambda: not any(thread.name == "patchpar-video" for thread in threading.enumerate()))


def test_a_video_that_fails_ends_the_stream_with_its_error_after_what_was_begun() -> None:
    """Nothing goes on with half a block."""

    def broken() -> Iterator[Tensor]:
        yield from torch.zeros(FORMAT.first_frame(4) - 1, FORMAT.height, FORMAT.width, 3, dtype=torch.uint8)
        raise ValueError("the camera is gone")

    ranks = Ranks()
    source = VideoSource(broken(), lambda block: FORMAT.first_frame(block + 1) - FORMAT.first_frame(block))
    taken = list[int]()
    frames = FrameSources(video=source)
    with StreamSession(ranks.run, (COURSE,), FORMAT, StreamDelivery(), None, frames, credit=3).begin() as stream:
        with pytest.raises(ValueError, match="the camera is gone"):
            taken.extend(chunk.block for chunk in stream)
        with pytest.raises(ValueError, match="the camera is gone"):
            next(stream)
    assert taken == [block for block, _ in ranks.begun] == [0, 1, 2]
    assert stream.status == "failed"


def test_a_block_begins_when_its_frames_have_come() -> None:
    """Not at the next frame, nor at the end of the video: a camera is as slow as time."""
    ranks, taken, were_taken = Ranks(), threading.Event(), list[bool]()

    def slow() -> Iterator[Tensor]:
        frame = torch.zeros(FORMAT.height, FORMAT.width, 3, dtype=torch.uint8)
        yield frame
        assert ranks.idle.wait(10)
        yield from [frame] * (FORMAT.frames_of(0) - 1)
        were_taken.append(taken.wait(10))

    frames = FrameSources(video=VideoSource(slow(), FORMAT.frames_of))
    with StreamSession(ranks.run, (COURSE,), FORMAT, StreamDelivery(), None, frames, credit=3) as stream:
        next(stream.begin())
        taken.set()
        assert list(stream) == []
    assert were_taken == [True]


def test_a_block_waits_for_the_frames_of_its_video_and_of_its_poses() -> None:
    def source(count: int) -> VideoSource:
        found = VideoSource(iter(torch.zeros(count, 2, 2, 3, dtype=torch.uint8)), frames_of)
        found._waiting.extend(found._frames)
        return found

    whole, half = source(3), source(2)
    assert FrameSources(video=whole, pose=whole).is_here(0)
    for frames in (FrameSources(video=half, pose=whole), FrameSources(video=whole, pose=half)):
        assert not frames.is_here(0)
        assert frames.read_ahead == [frames.video, frames.pose]


def test_a_stream_that_is_over_takes_no_frame() -> None:
    frames = FrameSources(video=LiveVideo(FORMAT.frames_of))
    stream = StreamSession(Ranks().run, (COURSE,), FORMAT, StreamDelivery(), None, frames, credit=1)
    image = torch.zeros(FORMAT.height, FORMAT.width, 3, dtype=torch.uint8)
    with stream.begin():
        stream.push_frame(image)
    with pytest.raises(PlanError, match="this stream is cancelled"):
        stream.push_frame(image)


def test_frames_before_an_error_are_taken() -> None:
    """Also where the error comes between two blocks: the stream does not end as if the video did."""

    def seven() -> Iterator[Tensor]:
        yield from torch.zeros(7, 2, 2, 3, dtype=torch.uint8)
        raise ValueError("the camera is gone")

    source, failed = VideoSource(seven(), frames_of), threading.Event()
    source.begin(lambda: failed.set() if source._error is not None else None)
    assert failed.wait(10)
    assert [len(source.take(block)) for block in (0, 1)] == [3, 4]
    assert not source.is_over(2)
    assert source.is_here(2)
    with pytest.raises(ValueError, match="the camera is gone"):
        source.take(2)


def test_a_video_that_stalls_holds_up_neither_chunks_nor_the_end() -> None:
    """Images may come from a camera or a network: what was begun is still taken, and the stream can be cancelled."""
    goes_on = threading.Event()

    def stalls() -> Iterator[Tensor]:
        yield from torch.zeros(FORMAT.first_frame(2), FORMAT.height, FORMAT.width, 3, dtype=torch.uint8)
        goes_on.wait(20)

    video: Any = stalls()
    frames = FrameSources(video=VideoSource(video, FORMAT.frames_of))
    stream = StreamSession(Ranks().run, (COURSE,), FORMAT, StreamDelivery(), None, frames, credit=3).begin()
    assert [next(stream).block, next(stream).block] == [0, 1]
    stream.close()
    assert stream.status == "cancelled"
    assert video.gi_running, "the video stalls still"
    goes_on.set()


def test_a_pipeline_streams_a_video(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", hears=False)
    (folder / "stream.json").write_text(json.dumps(STREAM))
    with StreamingPipeline.from_pretrained(folder, devices="cpu") as pipe:

        def frames(**options: Any) -> Tensor:
            with pipe.stream("a fox", seed=1, **options) as session:
                return torch.cat([chunk.frames for chunk in session])

        found = frames(video=list(images().numpy()), strength=0.2)
        assert found.shape == (COUNT, HEIGHT, WIDTH, 3), "as long as the video"
        assert torch.equal(found, frames(video=list(images().numpy()), strength=0.2))
        assert not torch.equal(found, frames(video=list(images(1).numpy()), strength=0.2))
        for options, message in (
            ({"video": list(images().numpy())}, r"at noise level 1, where nothing of it is left: pass strength="),
            ({"strength": 0.5}, r"starts at noise level 0\.5: pass video="),
            ({"video": [3], "strength": 2}, "strength=2: it must be above 0"),
            ({"video": [3], "strength": 0.5}, "a reference of"),
            ({"video": "none.mp4", "strength": 0.5}, "no such file"),
        ):
            with pytest.raises(PlanError, match=message):
                pipe.stream("a fox", **options)
        record = StreamDelivery(record=tmp_path / "a.jsonl")
        with pytest.raises(PlanError, match="holds no frames of a video"):
            pipe.stream("a fox", video=list(images().numpy()), strength=0.5, delivery=record)


def test_a_model_of_videos_says_that_it_needs_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", hears=False)
    config = StreamConfig.of({**STREAM, "sigmas": [0.7, 0.5, 0.0]})
    with (
        StreamingPipeline.from_pretrained(folder, devices="cpu", config=config) as pipe,
        pytest.raises(PlanError, match=r"this stream starts at noise level 0\.7: pass video="),
    ):
        pipe.stream("a fox")
