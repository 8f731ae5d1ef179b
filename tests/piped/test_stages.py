"""Pieces that pass through stages are those of one rank; in exact steps they are those of exact stages."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from patchpar.comm.banded_tensor import BandedTensor
from patchpar.comm.pytree import map_leaves
from patchpar.errors import PatchparError, PlanError, UnsupportedModel, VerificationError, WorkerDied
from patchpar.plan.plan import Plan
from patchpar.shard.piped.latent_bands import LatentBands
from patchpar.shard.piped.on_stages import CALLS_IN_FLIGHT
from patchpar.strategies.piped import PipedStages
from tests.breadth import first_of
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.tokens.piped import plain, shared

from .networks import Loop, call, here
from .networks import plain as without_pieces
from .on_threads import euler, in_stages, looped_in_stages

FLUX, SD3, PIXART = "FluxTransformer2DModel", "SD3Transformer2DModel", "PixArtTransformer2DModel"
NAMES = (
    *(FLUX, SD3, PIXART, "WanTransformer3DModel", "QwenImageTransformer2DModel", "ZImageTransformer2DModel"),
    *(
        "CogVideoXTransformer3DModel",
        "HunyuanVideoTransformer3DModel",
        "HunyuanDiT2DModel",
        "LTXVideoTransformer3DModel",
    ),
)
LIMIT = 1e-6


def with_lora(network: Any) -> None:
    """Adapters of random values in every block."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    network.requires_grad_(False)


@pytest.mark.parametrize(("name", "stages"), first_of([(n, s) for n in NAMES for s in (2, 3)], (SD3, 2)))
def test_stages_compute_what_one_rank_does(kept: Path, name: str, stages: int) -> None:
    strategy, calls = PipedStages(pieces=3), [call(name, step) for step in range(3)]
    wanted = here(name, strategy, kept).run([*calls, calls[-1]])
    found = in_stages(name, strategy, calls, stages=stages, folder=kept)
    for each in found:
        assert max(map(relative, each.predictions, wanted)) <= LIMIT
        assert all(map(torch.equal, each.predictions, found[0].predictions))
        assert each.restored
        assert not each.denoiser._known, "blocks may be divided in another way from now on"
        assert each.held < 1
    wrong = in_stages(name, strategy, calls, stages=stages, folder=kept, exchange="off")
    assert max(map(relative, wrong[0].predictions, wanted)) > 100 * LIMIT


@pytest.mark.parametrize("text", first_of(["once", "each"], "once"))
def test_bytes_of_a_step(kept: Path, text: Any) -> None:
    pieces, given = 3, call(FLUX, 0)
    found = in_stages(FLUX, PipedStages(pieces=pieces, text=text), [given] * 2, folder=kept)
    width = TRANSFORMERS[FLUX].build().config
    hidden = width["num_attention_heads"] * width["attention_head_dim"]
    image, words = given["hidden_states"].shape[1], given["encoder_hidden_states"].shape[1]
    batch, times = given["hidden_states"].shape[0], 1 if text == "once" else pieces
    assert found[0].sent == {"stage": batch * (image + times * words) * hidden * 4}
    assert found[1].sent == {"prediction": found[1].predictions[-1].nbytes}


@pytest.mark.breadth
def test_with_lora(kept: Path) -> None:
    strategy, calls = PipedStages(pieces=2), [call(FLUX, step) for step in range(3)]
    network: nn.Module = TRANSFORMERS[FLUX].build()
    without = without_pieces(FLUX, calls[-1])
    with_lora(network)
    wanted = here(FLUX, strategy, kept, network).run([*calls, calls[-1]])
    for each in in_stages(FLUX, strategy, calls, folder=kept, change=with_lora):
        assert max(map(relative, each.predictions, wanted)) <= LIMIT
        assert relative(each.predictions[-1], without) > 100 * LIMIT
        assert each.restored


@pytest.mark.parametrize("name", first_of(["flux", "sd3", "wan", "pixart"], "flux"))
def test_warm_up_to_the_end_is_an_exact_stage_and_ranks_hold_the_same_bits(kept: Path, name: str) -> None:
    wanted = plain(name)
    for found in shared(name, "stage=2,strategy=piped:pieces=2,warmup_steps=50", kept):
        assert torch.equal(found, wanted)
    one, other = shared(name, "stage=2,strategy=piped:pieces=2", kept)
    assert torch.equal(one, other)
    assert not torch.equal(one, wanted)
    assert relative(one, wanted) < 0.2


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_beside_guidance(kept: Path, name: str) -> None:
    """sd3 has both branches in one call, wan calls once for each."""
    wanted = shared(name, "stage=2,strategy=piped:pieces=2", kept)[0]
    for found in shared(name, "cfg=2,stage=2,strategy=piped:pieces=2", kept):
        assert relative(found, wanted) <= 1e-5


@pytest.mark.parametrize("name", first_of([FLUX, SD3, PIXART, "WanTransformer3DModel"], PIXART))
def test_a_loop_goes_on_before_a_prediction_has_arrived(kept: Path, name: str) -> None:
    """The latents of every step come from the prediction before, band by band; they are those of one rank."""
    strategy, given = PipedStages(pieces=3), call(name, 0)
    wanted = euler(here(name, strategy, kept), name, given)
    assert not any(isinstance(x, BandedTensor) for x in wanted)
    for in_bands in (True, False):
        found = looped_in_stages(name, strategy, given, folder=kept, in_bands=in_bands)
        for each in found:
            assert [isinstance(x, BandedTensor) for x in each] == [False, *[in_bands] * (len(each) - 1)]
            assert relative(each[-1], wanted[-1]) <= LIMIT
            assert torch.equal(each[-1], found[0][-1])


def test_the_first_stage_does_not_wait_for_the_last(kept: Path) -> None:
    """It computes the first piece of a step while the last stage still computes the last piece of the step before."""
    went_on, held_up = threading.Event(), threading.Event()

    def slow_down(stage: int, denoiser: Any) -> None:
        piece_of = denoiser._piece

        def piece(number: int, *args: Any, **kwargs: Any) -> Any:
            now = (stage, number, denoiser.patch.cache.evaluation) if len(denoiser._known) == 1 else None
            if now == (1, 2, 1):
                held_up.set()
                assert went_on.wait(20)
            found = piece_of(number, *args, **kwargs)
            if now == (0, 0, 2):
                went_on.set()
            return found

        denoiser._piece = piece

    found = looped_in_stages(FLUX, PipedStages(pieces=3), call(FLUX, 0), folder=kept, change=slow_down)
    assert held_up.is_set()
    assert went_on.is_set()
    assert torch.equal(found[0][-1], found[1][-1])


def test_a_latent_in_other_bands_than_the_pieces_is_complete_before_the_first(kept: Path) -> None:
    strategy, given, tokens = PipedStages(pieces=3), call(FLUX, 0), TRANSFORMERS[FLUX].tokens
    sizes = (1, given[tokens].shape[1] - 2, 1)

    def cut_anew(_: int, denoiser: Any) -> None:
        denoise = denoiser.denoise

        def cut(*args: Any, **kwargs: Any) -> Any:
            if isinstance(kwargs[tokens], BandedTensor):
                whole = kwargs[tokens].whole()
                void, bands = torch.full_like(whole, torch.nan), whole.split(sizes, -2)
                kwargs[tokens] = BandedTensor.of(void, -2, sizes, bands.__getitem__)
            return denoise(*args, **kwargs)

        denoiser.denoise = cut

    found = looped_in_stages(FLUX, strategy, given, folder=kept, change=cut_anew)
    wanted = looped_in_stages(FLUX, strategy, given, folder=kept)
    assert all(torch.equal(x[-1], y[-1]) for x, y in zip(found, wanted, strict=True))


def test_bands_that_are_not_those_of_the_pieces_are_not_used(kept: Path) -> None:
    """A wrong guess of where pieces lie in the latent: each piece is found to need more than its band."""
    strategy, given = PipedStages(pieces=3), call(FLUX, 0)
    sizes = (1, given[TRANSFORMERS[FLUX].tokens].shape[1] - 2, 1)

    def guess_wrong(_: int, denoiser: Any) -> None:
        denoiser._bands = lambda *_: LatentBands(-2, sizes)

    found = looped_in_stages(FLUX, strategy, given, folder=kept, change=guess_wrong)
    wanted = looped_in_stages(FLUX, strategy, given, folder=kept, in_bands=False)
    for of_stage, each in zip(found, wanted, strict=True):
        assert not any(isinstance(x, BandedTensor) for x in of_stage)
        assert torch.equal(of_stage[-1], each[-1])


def test_pieces_that_are_wrong_on_stages_are_refused(tmp_path: Path) -> None:
    """At the first call: they are compared with a whole one."""

    def spoil(_: int, denoiser: Any) -> None:
        in_pieces = denoiser._in_pieces
        denoiser._in_pieces = lambda *args, **kwargs: map_leaves(torch.zeros_like, in_pieces(*args, **kwargs))

    with pytest.raises(VerificationError, match=r"in 3 pieces that pass through 2 stages.*: use strategy=exact"):
        looped_in_stages(FLUX, PipedStages(pieces=3), call(FLUX, 0), folder=tmp_path, change=spoil)


def test_ranks_that_compute_different_pieces_are_refused(tmp_path: Path) -> None:
    """As where the network needs the text with every piece on the device of one of them, and nothing is verified."""

    def differ(stage: int, denoiser: Any) -> None:
        denoiser.verifications = denoiser.stages.verifications = None
        denoiser.text_once = stage == 0

    with pytest.raises(
        UnsupportedModel, match=f"the ranks compute different pieces of {FLUX}: .* devices of the same kind"
    ):
        looped_in_stages(FLUX, PipedStages(pieces=3), call(FLUX, 0), folder=tmp_path, change=differ)


@pytest.mark.parametrize("end", ["finish", "reset", "restore"])
def test_what_ends_an_image_leaves_no_message_in_flight(kept: Path, end: str) -> None:
    """Predictions have been sent that nobody has asked for; `reset` is the first to come if the image is given up."""
    strategy, given = PipedStages(pieces=3), call(FLUX, 0)
    pending: list[tuple[int, int]] = []
    placeholders: list[int] = []

    def with_another_before(_: int, denoiser: Any) -> None:
        begin = denoiser.reset

        def reset() -> None:
            denoiser.reset = begin
            euler(Loop(denoiser, denoiser.denoiser, denoiser.clock), FLUX, given, CALLS_IN_FLIGHT + 3)
            before = len(denoiser._in_flight)
            getattr(denoiser, end)()
            pending.append((before, len(denoiser._in_flight)))
            denoiser.clock.reset()
            begin()
            placeholders.append(len(denoiser.stages._placeholders._tensors))

        denoiser.reset = reset

    found = looped_in_stages(FLUX, strategy, given, folder=kept, change=with_another_before)
    assert pending == [(CALLS_IN_FLIGHT, 0)] * 2
    assert placeholders == [0, 0], "the next image may have other sizes"
    wanted = looped_in_stages(FLUX, strategy, given, folder=kept)
    assert all(torch.equal(x[-1], y[-1]) for x, y in zip(found, wanted, strict=True))


@pytest.mark.breadth
def test_a_stage_that_is_killed(ranks: Any) -> None:
    with pytest.raises(WorkerDied, match=r"rank 0 .*SIGKILL.*last exchange point 'output of a block, piece 1'"):
        ranks.run("tests.piped.pipelines:killed", 4)
    found = ranks.run("tests.piped.pipelines:latents", 4)  # on other workers
    assert found[0] is not None


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("stage=1,strategy=piped", "stage=1 has all blocks on one rank: use stage=2"),
        ("patch=2,strategy=piped", "stage=1 has all blocks on one rank: use stage=2"),
        ("stage=2,strategy=piped:pieces=0", "pieces=0: it is a whole number of at least 1"),
        ("stage=2,patch=2,strategy=piped", "pieces of the image one after the other.*use stage=4"),
    ],
)
def test_plans_that_are_refused(plan: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan.parse(plan)


def test_the_plan_is_read_as_it_is_printed() -> None:
    plan = Plan(cfg=2, stage=2, strategy=PipedStages(pieces=6, text="each"))
    assert str(plan) == "cfg=2,stage=2,strategy=piped:pieces=6:text=each"
    assert Plan.parse(str(plan)) == plan


def test_what_stages_cannot_do_is_refused_on_every_rank(kept: Path) -> None:
    with pytest.raises(PlanError, match=r"pieces=36, but transformer_blocks\.0 attention 0 has 35 tokens"):
        in_stages(FLUX, PipedStages(pieces=36), [call(FLUX, 0)] * 2, folder=kept)
    with pytest.raises(PatchparError, match="is a network of convolutions"):
        shared("sdxl", "stage=2,strategy=piped", kept)
