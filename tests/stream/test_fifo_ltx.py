"""LTX-Video as a stream without end: its own prediction where levels are alike, its own images, on any ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXPipeline
from torch import Tensor

from patchpar import FifoConfig, FifoOptions, FifoStreamingPipeline
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.streaming.decoder import as_pixels
from patchpar.models.streaming.fifo.ltx_decoder import LtxDecoder, latents_late
from patchpar.models.streaming.fifo.network import LtxFrames
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.delivery import StreamDelivery
from patchpar.stream.events import Prompt
from patchpar.stream.fifo.pipeline import ENGINE, FifoSession
from patchpar.stream.fifo.stage import FifoModel, FifoStage
from patchpar.stream.messages import StreamRun
from patchpar.stream.rank_runner import encoded_prompts
from patchpar.stream.stage import FinishedBlock, StageIO
from patchpar.stream.worker_group import ModelLoading, WorkerGroup
from tests.stream.on_pool import PoolExecutor
from tests.stream.running import Outcome, Script, differing
from tests.stream.test_ltx_decoder import whole
from tests.stream.test_session import COURSE, FORMAT, Ranks
from tests.tensors import noise
from tests.tiny import video_transformer_pipelines
from tests.unit.threads import on_threads

SIDE, FPS, TOKENS, SECONDS = 3, 16.0, 32, 5.0
QUEUE = FifoOptions(window=4, partitions=2, first_steps=2)
CONFIG = FifoConfig(fps=FPS, height=8 * SIDE, width=8 * SIDE, queue=QUEUE, text_tokens=TOKENS)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipe() -> LTXPipeline:
    made, _ = video_transformer_pipelines.ltx()
    for part in (made.transformer, made.vae, made.text_encoder):
        part.eval().requires_grad_(False)
    return made


@pytest.fixture(scope="module")
def folder(pipe: LTXPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ltx")
    pipe.save_pretrained(path)
    return path


@torch.no_grad()
def test_frames_of_one_level_are_what_the_pipeline_asks_for(pipe: LTXPipeline, folder: Path) -> None:
    """One timestep, positions stretched, a text with its padding and a mask: as LTXPipeline calls its transformer."""
    x = noise(1, 8, 4, SIDE, SIDE)
    text, mask, _, _ = pipe.encode_prompt("a fox", do_classifier_free_guidance=False, max_sequence_length=TOKENS)
    wanted = pipe.transformer(
        hidden_states=pipe._pack_latents(x, 1, 1),
        encoder_hidden_states=text,
        timestep=torch.tensor([600.0]),
        encoder_attention_mask=mask,
        num_frames=4,
        height=SIDE,
        width=SIDE,
        rope_interpolation_scale=(8 / FPS, 8, 8),
        return_dict=False,
    )[0]
    network = LtxFrames(pipe.transformer, (8 / FPS, 8.0, 8.0))
    cut, nothing = encoded_prompts(pipe, "a fox", None, max_sequence_length=TOKENS, device=CPU)
    assert cut.shape[1] == int(mask.sum()) < text.shape[1]
    assert nothing is None
    found = network.predict(x, [0.6] * 4, cut)
    assert (found - pipe._unpack_latents(wanted, 4, SIDE, SIDE)).abs().max() <= 1e-5 * wanted.abs().max()
    other = network.predict(x, [0.6, 0.6, 0.9, 0.6], cut)
    assert int((other - found).abs().amax((0, 1, 3, 4)).argmax()) == 2


def test_what_the_folder_says(pipe: LTXPipeline, folder: Path) -> None:
    facts = LtxFrames.facts(folder)
    assert (facts.per_latent, facts.spatial, facts.late) == (8, 8, latents_late(pipe.vae))
    assert facts.late > 1
    assert not facts.blends


def test_prompts_of_different_lengths_are_not_blended() -> None:
    """A rank would fail, and the stream with it."""
    session = FifoSession(Ranks().run, (COURSE,), FORMAT, StreamDelivery(), None, credit=3)
    session.blends = False
    with session.begin() as stream:
        with pytest.raises(PlanError, match="this model's prompts differ in length: use 'switch'"):
            stream.set_prompt("a hen", transition="blend", over=2)
        stream.set_prompt("a hen")


# --- on ranks ---------------------------------------------------------------------------------------------------------

BUILDING = threading.Lock()


def on_rank(transport: Transport, plan: StreamPlan, pipe: LTXPipeline, blocks: int) -> Outcome:
    outcome: Outcome = []

    def put(finished: FinishedBlock) -> None:
        assert finished.block == len(outcome), "frames come out in order"
        outcome.append((finished.latents[0], finished.frames))

    with BUILDING:
        text, negative = encoded_prompts(pipe, "a fox", "a hen", max_sequence_length=TOKENS, device=CPU)
        size = {"rows": SIDE, "columns": SIDE, "first_block": 0}
        run = StreamRun(ranks=1, seed=7, guidance_scale=3.0, adapt_sink=False, **size)
        network = LtxFrames(pipe.transformer, (8 / FPS, 8.0, 8.0))
        model = FifoModel(network, LtxDecoder(pipe.vae), QUEUE, run)
    script = Script({0: (Prompt(text=text, negative=negative),)}, blocks=blocks, hears=False)
    around = StageIO(order=script.order, put=put, is_cancelled=lambda: False)
    FifoStage(model, plan, transport.rank, Communicator(transport), around).run()
    return outcome


def spread(pipe: LTXPipeline, ranks: int, blocks: int) -> Outcome:
    plan = StreamPlan.even(QUEUE.zones, ranks)
    found = on_threads(ranks, on_rank, plan, pipe, blocks, deadline=60.0)
    errors = [error for error in found if isinstance(error, Exception)]
    if errors:
        raise errors[0]
    return found[plan.decoder]


@pytest.mark.breadth
@torch.no_grad()
def test_images_are_those_of_the_whole_video_on_any_ranks(pipe: LTXPipeline) -> None:
    blocks = latents_late(pipe.vae) + 3
    alone = spread(pipe, 1, blocks)
    assert [len(frames) for _, frames in alone] == [1, *[8] * (blocks - 1)]
    assert differing(spread(pipe, 3, blocks), alone) == []
    video = whole(pipe.vae, torch.cat([latents for latents, _ in alone], 2))
    displayed = torch.cat([frames for _, frames in alone])
    assert (displayed.int() - as_pixels(video).int()).abs().max() <= 1  # a rounding to the other side
    assert differing(spread(pipe, 1, 2), alone[:2]) == [0, 1]  # which end sooner, so that their images are others


# --- a folder and a prompt in, video out ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[FifoStreamingPipeline]:
    with FifoStreamingPipeline.from_pretrained(folder, devices="cpu", config=CONFIG) as made:
        yield made


def chunks(pipe: FifoStreamingPipeline) -> list[Tensor]:
    with pipe.stream("a fox", negative_prompt="blue", guidance_scale=3.0, seed=3, seconds=SECONDS) as session:
        session.set_prompt("a hen", at=6)
        found = list(session)
    assert [chunk.pts for chunk in found] == [max(0, 8 * number - 7) / FPS for number in range(len(found))]
    assert sum(len(chunk.frames) for chunk in found) >= SECONDS * FPS
    return [chunk.frames for chunk in found]


def test_workers_show_the_frames_of_one_process(alone: FifoStreamingPipeline, folder: Path, ranks: Any) -> None:
    executor: Any = alone._workers._ranks
    assert executor._engine._network._scale == (8 / FPS, 8.0, 8.0), "as LTXPipeline stretches positions"
    wanted = chunks(alone)
    assert wanted[1].shape == (8, 8 * SIDE, 8 * SIDE, 3)
    plan = StreamPlan(sizes=(2, 2), decode="own")  # the last rank has no transformer, the others no decoder
    executor = PoolExecutor(ranks, "fifo-ltx", ENGINE)
    facts = executor.call("load", str(folder), CONFIG, plan, {})[0]
    loading = ModelLoading(
        folder=str(folder), config=CONFIG, options={}, devices=("cpu",) * 3, deadline=60, engine=ENGINE
    )
    found = chunks(FifoStreamingPipeline(WorkerGroup(executor, plan, loading), CONFIG, facts))
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


def test_the_end_is_not_awaited_to_cancel(alone: FifoStreamingPipeline) -> None:
    with alone.stream("a fox", seed=3) as session:
        next(session)
        session.cancel()
    assert session.status == "cancelled"


def test_what_cannot_be(pipe: LTXPipeline) -> None:
    class Patched:
        class config:
            patch_size, patch_size_t, in_channels, out_channels = 2, 1, 8, 8

    with pytest.raises(UnsupportedModel, match="patches of 1 x 2 x 2"):
        LtxFrames(Patched(), (1.0, 1.0, 1.0))  # type: ignore[arg-type]
