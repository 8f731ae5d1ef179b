"""Images of a stream go whole to ranks in turn: the very images of the plain pipeline, whatever their steps."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline

from patchpar.errors import PlanError, WorkerDied, WorkerError
from patchpar.stream.images.pipeline import ImageSession, ImageStreamingPipeline
from patchpar.stream.images.runner import ImageRunner
from patchpar.stream.images.session import ImageStreamOptions
from patchpar.stream.messages import EndStream, GeneratedImage, ImageRequest
from tests.tiny import image_pipelines

OPTIONS = {"safety_checker": None, "feature_extractor": None}


def quiet(pipe: Any) -> Any:
    """Without a bar, and without dropout."""
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipe


def same(one: Any, other: Any) -> bool:
    return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())


class Dying:
    """Ranks that need some time for an image. `dies`: (rank, which of its requests it dies at).

    None begins an image before all `count` take requests: a thread that starts late would find all images made.
    """

    def __init__(self, dies: set[tuple[int, int]], count: int = 3) -> None:
        self.dies, self.count, self.all_there = dies, count, threading.Barrier(count)
        self.made: list[tuple[int, int]] = []  # (rank, image)
        self.begun: Counter[int] = Counter()
        self.asked: Counter[int] = Counter()

    def run(self, rank: int, on_event: Callable[[int, Any], None], on_start: Callable[[Any], None]) -> list[Any]:
        self.begun[rank] += 1
        heard: queue.Queue[Any] = queue.Queue()
        on_start(lambda _, word: heard.put(word))
        if self.begun[rank] == 1:
            self.all_there.wait(timeout=10)
        while isinstance(word := heard.get(timeout=10), ImageRequest):
            time.sleep(0.02)
            self.asked[rank] += 1
            if (rank, self.asked[rank]) in self.dies:
                raise WorkerDied(f"rank {rank} was killed", rank=rank)
            self.made.append((rank, word.number))
            on_event(rank, GeneratedImage(number=word.number, image=word.number))
        assert isinstance(word, EndStream)
        return []


def streamed(ranks: Dying, images: int = 9, **options: Any) -> list[int]:
    chosen = ImageStreamOptions(ranks=ranks.count, seed=1, **options)
    with ImageSession(ranks.run, chosen, {}) as stream:
        return [result.image for result in stream.map([{}] * images)]


def test_a_killed_rank_is_started_anew_and_no_image_is_lost() -> None:
    """Of 20 images each rank gets two: while it is busy with its first, only those that have credit are begun."""
    ranks = Dying({(1, 1), (0, 2)})
    assert streamed(ranks, images=20) == list(range(20))
    assert ranks.begun == {0: 2, 1: 2, 2: 1}
    assert sorted(image for _, image in ranks.made) == list(range(20)), "each once"


def test_a_rank_that_dies_again_and_again_is_left_out() -> None:
    ranks = Dying({(1, 1), (1, 2)})
    assert streamed(ranks) == list(range(9))
    assert ranks.begun[1] == 2
    assert {rank for rank, _ in ranks.made} == {0, 2}


def test_without_any_rank_the_stream_fails() -> None:
    ranks = Dying({(rank, 1 + number) for number in range(9) for rank in range(3)})
    with pytest.raises(WorkerDied, match="was killed"):
        streamed(ranks)
    with pytest.raises(WorkerDied, match="was killed"):
        streamed(Dying({(0, 1)}), restarts=0)


def test_what_a_pipeline_raises_ends_the_stream_at_once() -> None:
    """No other rank is to raise it too, and none is taken for a broken one."""
    ranks = Dying(set())

    def raises(rank: int, on_event: Any, on_start: Any) -> list[Any]:
        ranks.begun[rank] += 1
        heard: queue.Queue[Any] = queue.Queue()
        on_start(lambda _, word: heard.put(word))
        if isinstance(heard.get(timeout=10), ImageRequest):
            raise WorkerError(f"rank {rank} raised RuntimeError: sizes differ", rank=rank)
        return []

    ranks.run = raises  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match="raised RuntimeError: sizes differ"):
        streamed(ranks, images=1)
    assert ranks.begun == {0: 1, 1: 1, 2: 1}


def test_a_slow_rank_gets_fewer_images() -> None:
    """Two at a time at most wait for it, and the others go on: it is done when they have made most images."""
    ranks, most = Dying(set(), count=2), threading.Event()
    run = ranks.run

    def run_slowly(rank: int, on_event: Any, on_start: Any) -> list[Any]:
        def event(who: int, word: Any) -> None:
            if Counter(rank for rank, _ in ranks.made)[1] > 6:
                most.set()
            if rank == 0:
                most.wait(timeout=10)
            on_event(who, word)

        return run(rank, event, on_start)

    ranks.run = run_slowly  # type: ignore[method-assign]
    assert streamed(ranks, images=12, lead=9) == list(range(12))
    counts = Counter(rank for rank, _ in ranks.made)
    assert counts[0] < counts[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("img2img")
    image_pipelines.sd_img2img()[0].save_pretrained(path)
    return path


def test_a_worker_is_killed_and_images_of_any_number_of_steps_come_out(folder: Path) -> None:
    """One step too; with the bits of the plain pipeline, and the other worker is the same process."""
    _, arguments = image_pipelines.sd_img2img()
    requests = [{"image": arguments["image"], "num_inference_steps": 1 + n % 3, "prompt": f"{n}"} for n in range(8)]
    plain = {"strength": 1.0, "output_type": "np", "guidance_scale": 1.0}
    with ImageStreamingPipeline.from_pretrained(folder, devices="cpu:2", deadline=30, **OPTIONS) as pipe:
        ranks: Any = pipe._ranks
        with pipe.stream(seed=5, **plain) as stream:
            results = stream.map(requests)
            found = [next(results) for _ in range(3)]
            before = ranks.pids
            os.kill(before[1], signal.SIGKILL)
            found += list(results)
            assert ranks.pids[0] == before[0]
            assert ranks.pids[1] != before[1]
    assert [result.number for result in found] == list(range(8))
    oracle = quiet(DiffusionPipeline.from_pretrained(folder, **OPTIONS))
    for result, request in zip(found, requests, strict=True):
        wanted = oracle(**request, **plain, generator=torch.Generator().manual_seed(5)).images[0]
        assert same(result.image, wanted), result.number
    assert not same(found[0].image, found[1].image)


def test_a_strength_that_leaves_no_step_is_refused_by_name() -> None:
    """In diffusers it ends in an empty tensor."""
    pipe, arguments = image_pipelines.sd_img2img()
    runner = ImageRunner(SimpleNamespace(rank=0, world_size=1, device="cpu", deadline=30.0))  # type: ignore[arg-type]
    runner._pipe = quiet(pipe)
    few = {**arguments, "num_inference_steps": 2, "strength": 0.3}
    with pytest.raises(PlanError, match=r"strength=0\.3, num_inference_steps=2: no denoising step is left to make"):
        runner._generated(ImageRequest(number=0, arguments=few, seed=0))


@pytest.mark.breadth
def test_an_image_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its VAE and its text encoder run as often as in the plain pipeline: 1 and 1, without guidance."""
    pipe, arguments = image_pipelines.sd_img2img()
    calls: Counter[str] = Counter()
    encode = AutoencoderKL.encode
    monkeypatch.setattr(AutoencoderKL, "encode", lambda *a, **k: (calls.update(["vae"]), encode(*a, **k))[1])
    pipe.text_encoder.register_forward_pre_hook(lambda *_: calls.update(["text"]))
    words: list[Any] = [
        ImageRequest(number=n, arguments={**arguments, "guidance_scale": 1.0}, seed=n) for n in range(4)
    ]

    class Context:
        rank, world_size, device, deadline = 0, 1, "cpu", 30.0
        beat = staticmethod(lambda where: None)
        emit = staticmethod(lambda event: calls.update(["image"]))
        receive = staticmethod(lambda timeout: words.pop(0) if words else EndStream())

    runner = ImageRunner(Context())  # type: ignore[arg-type]
    runner._pipe = quiet(pipe)
    assert runner.run() == 4
    assert calls == {"vae": 4, "text": 4, "image": 4}
