"""The program of a rank, recorded without weights and other ranks, sends what a real rank sends, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from patchpar.comm.transport import Incoming, Outgoing, TensorSpec
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.dry_run.dry_run import dry_run
from patchpar.pipeline.planner import recording_runner
from patchpar.pipeline.planner.empty_call import arguments_of_first_call
from patchpar.pipeline.planner.image_ranks import unequal_pairs
from patchpar.pipeline.planner.record import Recording
from patchpar.pipeline.planner.record_options import KnownTokens, RecordOptions
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.recording_transport import RecordingTransport
from patchpar.pipeline.planner.tape_recorder import TapeRecorder, calls_of
from patchpar.plan.plan import Plan
from patchpar.plan.replay.tape import Leave, Operator, Send, Wait, bytes_copied, bytes_sent, steps_of
from patchpar.shard.stages.search import CutSearch
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.transformer.token_plan_json import from_json
from tests import tiny
from tests.breadth import first_of
from tests.planner.on_ranks import STEPS, call_of

LONGEST_TEXTS = ("qwen", "qwen_edit", "cogview4")
"""Their pipelines cut texts to their length, which values tell: recorded are those of full length."""
UNKNOWN = "allegro"
"""A transformer of whose class the package has no token plan."""
EXACT = ["patch=2", "patch=3", "patch=2,strategy=exact:ulysses=2", "patch=2,strategy=exact:attention=ring"]
EXACT += ["patch=2,strategy=exact:attention=two-way-ring", "patch=3,strategy=exact:attention=token-ring"]
EXACT += ["patch=4,strategy=exact:ulysses=2"]
STALE = ["patch=3,strategy=displaced:warmup_steps=1", "patch=2,strategy=displaced:preset=paper:warmup_steps=1"]
STALE += ["patch=3,strategy=pcpp:warmup_steps=1", "patch=3,strategy=fresh-edges"]
STALE += ["patch=2,strategy=fresh-edges:context=pooled", "patch=2,strategy=fresh-edges:context=pooled:bits=4"]
STALE += ["patch=2,strategy=fresh-edges:context=partials", "patch=2,strategy=fresh-edges:correction=linear"]
GUIDED = ["cfg=2", "cfg=2,patch=2"]
ONE_ENCODER = ["cfg=2,encoders=one", "patch=3,encoders=one"]
SHARDED = ["patch=2,weights=sharded", "patch=3,weights=sharded,resident=1", "cfg=2,weights=sharded"]
HOSTED = ["patch=2,weights=hosted", "patch=3,weights=hosted,resident=1", "cfg=2,weights=hosted"]
STAGES = ["stage=2", "cfg=2,stage=2", "stage=2,patch=2", "stage=2,weights=hosted"]
PIPED = ["stage=2,strategy=piped:warmup_steps=1", "stage=3,strategy=piped:pieces=3"]
FEATURES = ["tensor=2", "cfg=2,tensor=2", "patch=2,tensor=2"]
WITH_A_CONTROLNET = ["cfg=2,patch=2", "patch=2,weights=sharded", "stage=2"]
STALE_BESIDE_IT = ["patch=3,strategy=displaced:warmup_steps=1", "patch=2,strategy=fresh-edges"]
OF_A_UNET = ("sd", ["patch=2,strategy=fresh-edges", "stage=2", "patch=2,weights=hosted"])
FEATURES_EVERY_DAY = ("sd3", ["tensor=2"])


def recorded(name: str, plan: str, ranks: int = 0, steps: int = STEPS, **options: Any) -> list[RecordedRank]:
    """The first so many ranks, all by default."""
    parsed = Plan.parse(plan)
    recording = Recording(tiny.build(name).pipe, parsed, call_of(name, steps), RecordOptions(steps=steps, **options))
    return [recording.of_rank(rank) for rank in range(ranks or parsed.world_size)]


def compare(ranks: Any, name: str, plans: list[str]) -> None:
    """Also with no exchange between patches and features, for the control: then the bytes are others."""
    of_ranks = ranks.run("tests.planner.on_ranks:counted", 4, name, plans)
    for number, plan in enumerate(plans):
        real = [found[number] for found in of_ranks if found[number] is not None]
        tokens = KnownTokens({kind: from_json(text) for kind, text in real[0].tokens.items()})
        for found, rank in zip(recorded(name, plan, tokens=tokens), real, strict=True):
            where = f"{name}, {plan}, rank {found.rank}"
            if name in LONGEST_TEXTS:
                sent = bytes_sent(found.tape)
                assert sent.keys() == without_zeros(rank.stats.bytes_sent).keys(), where
                assert all(sent[kind] >= real_bytes for kind, real_bytes in rank.stats.bytes_sent.items()), where
                continue
            sent = bytes_sent(found.tape)
            encoded = sent.pop("encoders", 0)
            assert sent == without_zeros(rank.stats.bytes_sent), where
            received = sum(rank.stats.bytes_received.values())
            assert encoded + bytes_received(found) == received + rank.encoded, where
            assert found.stale_bytes == rank.stats.stale_bytes, where
            steps = steps_of(found.tape)
            for step, stats in enumerate(rank.stats.steps):
                found_here = bytes_sent(steps[f"step {step}"])
                assert found_here == without_zeros(stats.bytes_sent), f"{where}, step {step}"
        if "patch" in plan or "tensor" in plan:
            (alone,) = recorded(name, plan, ranks=1, tokens=tokens, exchange="off")
            assert dict(bytes_sent(alone.tape)) != dict(real[0].stats.bytes_sent), f"{name}, {plan}, without exchange"


def without_zeros(counted: Mapping[str, int]) -> Counter[str]:
    """A first stage counts a prediction that it has only received."""
    return +Counter(counted)


def bytes_received(found: RecordedRank) -> int:
    return sum(entry.num_bytes for entry in found.tape if isinstance(entry, Wait))


@pytest.mark.parametrize(
    ("name", "plans"),
    first_of(
        [OF_A_UNET]
        + [(name, plans) for name in ("sdxl", "svd", "flux", "pixart", "wan") for plans in (EXACT, STALE)]
        + [(name, ONE_ENCODER) for name in ("sd", "sdxl", "wan")]
        + [(name, SHARDED) for name in ("sdxl", "flux", "sd3", "wan")]
        + [(name, HOSTED) for name in ("sdxl", "flux", "sd3", "wan")]
        + [(name, STAGES) for name in ("sd", "sdxl", "flux", "sd3", "wan", "pixart", "qwen")]
        + [(name, PIPED) for name in ("flux", "pixart", "wan")]
        + [(name, FEATURES) for name in ("flux", "sd3", "wan", "pixart")]
        + [
            (name, plans)
            for name in ("sd_controlnet", "sdxl_controlnet")
            for plans in (WITH_A_CONTROLNET, STALE_BESIDE_IT)
        ]
        + [FEATURES_EVERY_DAY]
        + [(name, ["patch=2"]) for name in tiny.BUILDERS | tiny.RARER]
        + [(name, GUIDED) for name in (*tiny.BATCHED, *tiny.SEQUENTIAL)],
        FEATURES_EVERY_DAY,
    ),
)
def test_bytes_are_those_that_real_ranks_count(ranks: Any, name: str, plans: list[str]) -> None:
    compare(ranks, name, plans)


@pytest.mark.parametrize("name", first_of(["wan_ti2v", "wan_ti2v_image", "ltx_image", "ltx_condition", "ltx2"]))
def test_tokens_with_a_time_each_are_recorded_by_the_plan_of_the_package(name: str) -> None:
    """Also where other calls of the same class have one time for all tokens."""
    tapes = [each.tape for each in recorded(name, "patch=2", steps=1)]
    assert unequal_pairs(tapes) == []
    assert all(bytes_sent(tape)["kv"] > 0 for tape in tapes)


def test_calls_for_each_guidance_branch_are_exchanged_from_the_first_step() -> None:
    """Also by a rank that is recorded after another one, from which it knows all but the form of these calls."""
    found = recorded("wan", "cfg=2", steps=1)
    assert unequal_pairs([each.tape for each in found]) == []
    assert bytes_sent(found[0].tape)["guidance"] == bytes_sent(found[1].tape)["guidance"] > 0


def test_recordings_end_where_ranks_with_a_branch_each_gather_weights() -> None:
    """Nobody says there which calls the other ranks have made."""
    first, second = (steps_of(each.tape)["step 1"] for each in recorded("wan", "cfg=2,weights=sharded", steps=2))
    assert bytes_sent(first) == bytes_sent(second)
    assert bytes_sent(first)["guidance"] > 0


def test_a_step_of_one_rank_has_the_flops_of_a_dry_run() -> None:
    """A band has about half of them: attention to all keys is whole, and so is what belongs to no position."""
    (one,), (band,) = recorded("sd", "single", steps=2), recorded("sd", "patch=2", ranks=1, steps=2)
    whole = dry_run(tiny.build("sd").pipe, **call_of("sd", 2))
    assert flops(one) == pytest.approx(whole.flops_per_call, rel=1e-6)
    assert 0.5 * flops(one) <= flops(band) <= 0.75 * flops(one)
    assert one.peaks == dict(whole.peaks)
    assert band.peaks["denoise"] < one.peaks["denoise"]


def flops(found: RecordedRank, phase: str = "step 1") -> int:
    return sum(entry.flops for entry in steps_of(found.tape)[phase] if isinstance(entry, Operator))


@pytest.mark.parametrize(("name", "without"), [("sd_controlnet", "sd"), ("sdxl_controlnet", "sdxl")])
def test_a_step_begins_with_a_network_that_conditions_its_denoiser(name: str, without: str) -> None:
    """Which is called before it, in the first step too. It is no denoiser that is called again."""
    for plan in ("single", "patch=2"):
        (found,) = recorded(name, plan, ranks=1, steps=2)
        alone = flops(recorded(without, plan, ranks=1, steps=2)[0])
        assert flops(found, "step 0") == flops(found, "step 1") > 1.2 * alone, plan
        assert [calls_of(steps_of(found.tape)[f"step {step}"]) for step in range(2)] == [1, 1]
    assert bytes_sent(steps_of(found.tape)["step 0"]) == bytes_sent(steps_of(found.tape)["step 1"])


def test_ranks_on_gpus_exchange_in_operations_of_all() -> None:
    """The same bytes; attention to all keys at once is one kernel, instead of one for each rank and their merge."""
    apart, joined = (recorded("sd3", "patch=2", 1, 1, joined=joined)[0] for joined in (False, True))
    assert bytes_sent(apart.tape) == bytes_sent(joined.tape)
    assert attentions(joined) < attentions(apart)


@pytest.mark.parametrize("plan", ["patch=3", "patch=3,strategy=fresh-edges"])
def test_ranks_on_gpus_gather_as_many_tokens_as_each_has(plan: str) -> None:
    """From buffers as long as those of the rank with most: of a text whose tokens three ranks cannot share evenly."""
    apart, joined = (recorded("sd3", plan, steps=2, joined=joined) for joined in (False, True))
    assert unequal_pairs([each.tape for each in joined]) == []
    assert [bytes_sent(each.tape) for each in apart] == [bytes_sent(each.tape) for each in joined]


def test_a_rank_recorded_after_others_makes_the_same_calls_for_texts_of_two_lengths() -> None:
    """Nothing is left to be found in the first call with the other length, of which real ranks make one more."""
    first, second = recorded("qwen", "patch=2", steps=2)
    assert unequal_pairs([first.tape, second.tape]) == []
    calls = [sum(isinstance(each, Operator) for each in rank.tape) for rank in (first, second)]
    assert calls[0] == pytest.approx(calls[1], rel=0.05)


def test_frames_of_a_vae_see_those_before_them_in_bands_of_several_sizes() -> None:
    """A mask of values that are not there says which. Each frame is one attention, to the keys of all ranks."""
    pipe, plan = tiny.build("hunyuan_video").pipe, Plan.parse("patch=3")
    pipe.vae.tile_sample_min_num_frames = pipe.vae.tile_sample_stride_num_frames = 4  # two, two and one of three
    recording = Recording(pipe, plan, call_of("hunyuan_video", 1))
    ranks = [recording.of_rank(rank) for rank in range(3)]
    assert unequal_pairs([each.tape for each in ranks]) == []
    decoding = [replace(each, tape=steps_of(each.tape)["decode"]) for each in ranks]
    assert [attentions(each) for each in decoding] == [5] * 3


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [("exact:attention=ring", 2), ("exact:overlap=true", 2), ("exact:ulysses=2", 1)],
    ids=["ring", "overlap", "ulysses"],
)
def test_attention_in_parts_is_in_the_dtype_of_the_model_on_gpus(strategy: str, parts: int) -> None:
    """Workers on CPUs compute parts in fp32. The two ranks have about half of the FLOPs each."""
    pipe, plan = tiny.build("sd3").pipe.to(torch.bfloat16), Plan.parse(f"patch=2,strategy={strategy}")
    counted = {}
    for each in (Plan(), plan):
        recording = Recording(pipe, each, call_of("sd3", 1), RecordOptions(joined=True, steps=1))
        tape = steps_of(recording.of_rank(0).tape)["step 0"]
        counted[each] = [entry for entry in tape if isinstance(entry, Operator) and entry.name == "attention"]
    whole, found = counted[Plan()], counted[plan]
    assert {entry.dtype for entry in found} == {"bfloat16"}
    assert len(found) == parts * len(whole)
    assert 2 * sum(entry.flops for entry in found) == pytest.approx(sum(entry.flops for entry in whole), rel=0.02)


def test_what_one_operation_gathers_is_there_together() -> None:
    """Messages apart are waited for one by one, so that what has come can be used while the others are on their way."""
    incoming = [Incoming(peer, (TensorSpec((4,), torch.float32),)) for peer in (1, 2)]
    for joined, waits in ((True, 2), (False, 1)):
        tape = TapeRecorder(joined=joined)
        transport = RecordingTransport(0, tape, joined=joined)
        own, rows = torch.empty(4, device="meta"), torch.empty(3, 4, device="meta")
        if transport.collectives is None:
            work = transport.send_recv([], incoming, "attention")
        else:
            work = transport.collectives.gather_messages((0, 1, 2), own, rows, incoming, "attention")
        arriving = work.arriving()
        next(arriving)
        assert sum(isinstance(entry, Wait) for entry in tape.tape) == waits
        next(arriving)
        assert sum(isinstance(entry, Wait) for entry in tape.tape) == 2


@pytest.mark.parametrize("joined", [True, False])
def test_who_sends_in_an_operation_waits_until_it_is_there(*, joined: bool) -> None:
    """Also one who gets nothing. What the other ranks have no part in leaves, and is not waited for."""
    tape = TapeRecorder(joined=joined)
    work = RecordingTransport(0, tape, joined=joined).send_recv([Outgoing((1,), (torch.empty(2),))], [], "hidden")
    (sent,) = [entry for entry in tape.tape if isinstance(entry, Send)]
    assert bool(sent.operation) == joined
    for _ in range(2):
        work.wait()
        left = [entry.operation for entry in tape.tape if isinstance(entry, Leave)]
        assert left == ([sent.operation] if joined else [])
    tape.begin()
    work = RecordingTransport(0, tape, joined=joined).send_recv([Outgoing((1,), (torch.empty(2),))], [], "hidden")
    tape.begin()
    work.wait()
    assert not any(isinstance(entry, Leave) for entry in tape.tape), "the call that it was sent in is over"


def test_what_is_aligned_in_a_buffer_is_counted_as_it_is() -> None:
    """A stamp of 24 bytes and a prediction in half precision; what one rank sends, the other waits for."""
    pipe = tiny.build("sd").pipe.to(torch.float16)
    recording = Recording(pipe, Plan(cfg=2), call_of("sd", 1), RecordOptions(joined=True))
    tapes = [recording.of_rank(rank).tape for rank in range(2)]
    assert bytes_sent(tapes[0])["guidance"]
    assert unequal_pairs(tapes) == []


@pytest.mark.breadth
def test_kernels_that_are_fused_on_gpus_are_one() -> None:
    apart, joined = (operators(recorded("sd", "patch=2", 1, 1, joined=joined)[0]) for joined in (False, True))
    assert joined["concat_halo"] > 0 == apart["concat_halo"]
    assert joined.total() < 0.8 * apart.total()


def operators(found: RecordedRank) -> Counter[str]:
    return Counter(entry.name for entry in steps_of(found.tape)["step 0"] if isinstance(entry, Operator))


def attentions(found: RecordedRank) -> int:
    return sum(entry.name == "attention" for entry in found.tape if isinstance(entry, Operator))


def test_a_plan_that_cannot_be_is_refused() -> None:
    recording = Recording(tiny.build("sd").pipe, Plan(patch=64), call_of("sd"))
    with pytest.raises(PlanError, match="bands of"):
        recording.of_rank(0)
    with pytest.raises(PlanError, match="rank 64 of plan"):
        recording.of_rank(64)


def test_encoders_on_one_rank_send_to_the_others_which_hold_none_of_their_weights() -> None:
    """Recorded from the last rank on, as the first."""
    recording = Recording(tiny.build("sd").pipe, Plan(patch=2, encoders="one"), call_of("sd", 1))
    second, first = (recording.of_rank(rank) for rank in (1, 0))
    assert bytes_sent(first.tape)["encoders"] > 0 == bytes_sent(second.tape)["encoders"]
    assert unequal_pairs([first.tape, second.tape]) == []
    assert second.weight_bytes["text_encoder"] < 0.01 * first.weight_bytes["text_encoder"]  # position ids
    assert recording.of_rank(0).weight_bytes == first.weight_bytes


def test_skip_connections_are_carried_to_the_stage_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: by values, of which there are none, every cut looks right with the last block's answer alone."""
    (right,) = recorded("sd", "stage=2", ranks=1, steps=1)
    monkeypatch.setattr(recording_runner, "CutsWithoutValues", CutSearch)
    (wrong,) = recorded("sd", "stage=2", ranks=1, steps=1)
    assert bytes_sent(right.tape)["stage"] > bytes_sent(wrong.tape)["stage"] > 0


def test_a_stage_holds_the_weights_of_its_own_blocks() -> None:
    (whole,) = recorded("flux", "single", steps=1)
    stages = recorded("flux", "stage=2", steps=1)
    blocks = [whole.weight_bytes["transformer"] - each.weight_bytes["transformer"] for each in stages]
    assert all(each > 0.2 * whole.weight_bytes["transformer"] for each in blocks)


def test_hosted_stages_are_those_of_whole_weights_with_slots_for_two_blocks() -> None:
    """Their blocks are on the device after the first call."""
    (whole,) = recorded("flux", "stage=2", ranks=1, steps=1)
    (hosted,) = recorded("flux", "stage=2,weights=hosted", ranks=1, steps=1)
    assert hosted.tape == whole.tape
    assert hosted.weight_bytes == whole.weight_bytes
    assert min(hosted.peaks[phase] - most for phase, most in whole.peaks.items()) > 0


def test_hosted_blocks_are_copied_while_the_one_before_computes() -> None:
    """Each once in a call of the denoiser, and asked for before the kernels of the block that runs before it."""
    (found,) = recorded("flux", "weights=hosted", steps=2, joined=True)
    (whole,) = recorded("flux", "single", steps=2, joined=True)
    step = steps_of(found.tape)["step 1"]
    copies = [at for at, entry in enumerate(step) if isinstance(entry, Send)]
    waits = {entry.number: at for at, entry in enumerate(step) if isinstance(entry, Wait)}
    sent = [entry for entry in step if isinstance(entry, Send)]
    assert {entry.kind for entry in sent} == {"host"}
    assert len(sent) == calls_of(step) * len({entry.where for entry in sent}) == len(waits)
    missing = whole.weight_bytes["transformer"] - found.weight_bytes["transformer"]
    assert bytes_copied(step) == pytest.approx(calls_of(step) * missing, rel=0.01)
    assert not bytes_sent(step)
    for before, after in pairwise(copies):
        assert any(isinstance(entry, Operator) for entry in step[before:after])
    later = [at for at in copies if step[at].number in waits]  # type: ignore[union-attr]
    assert len(later) == len(copies) - 1  # the first block of the next step
    for at in later:
        between = step[at : waits[step[at].number]]  # type: ignore[union-attr]
        assert any(isinstance(entry, Operator) for entry in between)


def test_a_transformer_without_a_known_token_plan_is_refused() -> None:
    recording = Recording(tiny.build(UNKNOWN).pipe, Plan(patch=2), call_of(UNKNOWN))
    with pytest.raises(UnsupportedModel, match=r"found by computing with values.*use cfg=2 or data=N"):
        recording.of_rank(0)


def tokens_by_values(model: tiny.Tiny) -> TokenPlan:
    call = arguments_of_first_call(model.denoiser, lambda: model.pipe(**call_of("flux")))
    return discover_tokens(model.denoiser, model.denoiser.forward, call.args, call.kwargs)


@pytest.mark.breadth
def test_tokens_of_a_model_with_values_are_found_by_its_first_call() -> None:
    """The split is that of the plan in the package."""
    found = tiny.build("flux")
    plan = tokens_by_values(found)
    tokens = KnownTokens({type(found.denoiser).__name__: plan})
    assert tokens.of(found.denoiser) is plan
    (own,), (shipped,) = (recorded("flux", "patch=2", 1, 1, tokens=each) for each in (tokens, KnownTokens()))
    assert bytes_sent(own.tape) == bytes_sent(shipped.tape) != {}
