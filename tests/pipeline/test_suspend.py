"""Suspended calls: they go on elsewhere from the denoiser call that was next, bit for bit, or start anew and say so."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from patchpar import CallSuspended, ParallelPipeline, PlanError, SuspendedCall
from patchpar.pipeline import call_recorder
from patchpar.pipeline import suspended_call as suspended_call_module
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.call_journal import CallJournal
from patchpar.pipeline.call_placement import CallPlacement
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.job import PipelineJob
from patchpar.pipeline.messages import CallbackChange, CallbackResult, RecordedPrediction, TensorBytes
from patchpar.pipeline.startup import plan_of
from patchpar.pipeline.tensor_file import TensorTable
from tests.pipeline.conftest import EXACT, QUICK, Hold, generator, relative_error, tensor_of
from tests.tiny import BUILDERS, RARER, Tiny, build

SECONDS = 120.0
CALL = {**QUICK, "num_inference_steps": 4, "output_type": "latent"}
DAILY = ("sdxl", "sd_controlnet", "wan", "zimage", "hunyuan_video")
ELSE = tuple(name for name in (*BUILDERS, *RARER) if name not in DAILY)
FULL_IMAGES = ("ldm_text", "ddpm", "ddim", "consistency", "dit")


def arguments_of(tiny: Tiny, **changes: Any) -> dict[str, Any]:
    latent = {} if tiny.name in FULL_IMAGES else {"output_type": "latent"}
    return {"num_inference_steps": 3, **latent, **tiny.call_kwargs, **changes, "generator": generator()}


@contextmanager
def counted(pipe: Any) -> Iterator[Counter[str]]:
    """Count the calls of denoisers that are computed in this process."""
    found: Counter[str] = Counter()
    networks = [name for name in ("unet", "transformer", "transformer_2") if getattr(pipe, name, None) is not None]

    def count(name: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
        found[name] += 1
        return forward(*args, **kwargs)

    for name in networks:
        network = getattr(pipe, name)
        network.forward = lambda *args, n=name, f=network.forward, **kwargs: count(n, f, *args, **kwargs)
    try:
        yield found
    finally:
        for name in networks:
            del getattr(pipe, name).forward


def recorded(pipe: ParallelPipeline, plan: Any = None, **arguments: Any) -> tuple[Any, SuspendedCall]:
    """Output of a whole job, and what `suspend` would have returned at its end."""
    wanted = plan_of(plan) if plan else pipe._state.wanted
    job = pipe._job(CallPlacement(rule=choose, plan=wanted), (), arguments)
    job._caller.release = lambda: None
    job.start()
    output = job.result(SECONDS)
    journal = job._caller.journal
    assert journal is not None
    return output, job._as_it_is(journal)


def cut(suspended: SuspendedCall, count: int) -> SuspendedCall:
    """As after so many denoiser calls."""
    return replace(suspended, calls=tuple(call for call in suspended.calls if call.number < count))


@pytest.mark.parametrize("name", [*DAILY, *(pytest.param(name, marks=pytest.mark.breadth) for name in ELSE)])
def test_a_resumed_call_is_that_of_plain_diffusers_bit_for_bit(name: str) -> None:
    """From its middle, also between the two calls of a step, and from its end; nothing is computed again."""
    tiny = build(name)
    want = tensor_of(tiny.pipe(**arguments_of(tiny)))
    with ParallelPipeline(tiny.pipe, devices="cpu") as pipe, counted(tiny.pipe) as computed:
        pipe.set_progress_bar_config(disable=True)
        output, suspended = recorded(pipe, **arguments_of(tiny))
        assert torch.equal(tensor_of(output), want)
        total = computed.total()
        assert suspended.num_calls == total >= 2
        for count in sorted({1, total // 2, total}):
            computed.clear()
            job = pipe.submit(**arguments_of(tiny), resume=cut(suspended, count))
            assert torch.equal(tensor_of(job.result(SECONDS)), want)
            assert computed.total() == total - count


def test_recorded_predictions_are_used() -> None:
    """Control: with another prediction the image is another one."""
    tiny = build("sdxl")
    with ParallelPipeline(tiny.pipe, devices="cpu") as pipe:
        pipe.set_progress_bar_config(disable=True)
        want, suspended = recorded(pipe, **arguments_of(tiny))
        last = suspended.calls[-1]
        other = replace(last, tensors=suspended.calls[0].tensors)
        changed = replace(suspended, calls=(*suspended.calls[:-1], other))
        found = pipe.submit(**arguments_of(tiny), resume=changed).result(SECONDS)
        assert relative_error(found, want) > 100 * EXACT


def test_another_sample_starts_from_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    """As after another text encoder: the predictions so far are of another image."""
    tiny = build("sdxl")
    with ParallelPipeline(tiny.pipe, devices="cpu") as pipe:
        pipe.set_progress_bar_config(disable=True)
        want, suspended = recorded(pipe, **arguments_of(tiny))
        wrong = tuple(replace(call, checksum=call.checksum ^ (call.number == 1)) for call in suspended.calls)
        with caplog.at_level(logging.WARNING):
            found = pipe.submit(**arguments_of(tiny), resume=replace(suspended, calls=wrong)).result(SECONDS)
        assert torch.equal(tensor_of(found), tensor_of(want))
        assert "a job starts from its beginning: denoiser call 1 got a sample with checksum" in caplog.text


def test_a_job_is_suspended_on_two_ranks_and_goes_on_from_a_file(parallel: ParallelPipeline, tmp_path: Path) -> None:
    call = {**CALL, "num_inference_steps": 10}
    whole = parallel.submit(**call, plan="patch=2", generator=generator()).result(SECONDS)
    pids = parallel._executor.pids
    job = parallel.submit(**call, plan="patch=2", generator=generator())
    while job.progress.step < 2:
        time.sleep(0.005)
    suspended = job.suspend(SECONDS)
    assert suspended is not None
    assert 2 <= suspended.num_calls < 10
    assert suspended.num_calls - suspended.step in (0, 1)
    with pytest.raises(CallSuspended, match=f"suspended after {suspended.num_calls} denoiser calls"):
        job.result()
    path = tmp_path / "call.safetensors"
    suspended.save(path)
    assert SuspendedCall.load(path) == suspended
    assert {len(x.shape) for x in load_file(path).values()} == {1}, "any reader of safetensors can read it"
    again = parallel.submit(**call, plan="patch=2", resume=SuspendedCall.load(path), generator=generator(7))
    assert relative_error(again.result(SECONDS), whole) == 0.0
    assert parallel._executor.pids == pids


def test_it_goes_on_with_another_plan_and_in_another_process(parallel: ParallelPipeline, plain: Any) -> None:
    want = plain(**CALL, generator=generator())
    _, suspended = recorded(parallel, "patch=2", **CALL, generator=generator())
    part = cut(suspended, 2)
    for plan in ("cfg=2", "single"):
        again = parallel.submit(**CALL, plan=plan, resume=part, generator=generator())
        assert relative_error(again.result(SECONDS), want) <= EXACT
    with ParallelPipeline(build("sdxl").pipe, devices="cpu") as alone:
        alone.set_progress_bar_config(disable=True)
        found = alone.submit(**CALL, resume=part, generator=generator()).result(SECONDS)
    assert relative_error(found, want) <= EXACT


@pytest.mark.breadth
def test_a_job_that_waits_is_suspended_at_once_and_one_that_is_over_is_not(parallel: ParallelPipeline) -> None:
    first = parallel.submit(**{**CALL, "num_inference_steps": 200}, plan="patch=2")
    waits = parallel.submit(**CALL, plan="patch=2")
    suspended = waits.suspend(SECONDS)
    assert suspended is not None
    assert suspended.calls == ()
    assert not first.is_over
    first.cancel()
    torch.manual_seed(1)  # the noise is of the seed that the job had
    found = [parallel.submit(**CALL, plan="patch=2", resume=suspended) for _ in range(2)]
    assert relative_error(found[0].result(SECONDS), found[1].result(SECONDS)) == 0.0
    assert found[0].suspend() is None


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["flux", pytest.param("wan_two", marks=pytest.mark.breadth)])
def test_guidance_in_two_calls_goes_on_between_them(hold: Hold, name: str) -> None:
    """On two ranks that make a call each, and on one."""
    tiny = build(name)
    arguments = {**arguments_of(tiny), "true_cfg_scale": 2.0, "negative_prompt": "fog"} if name == "flux" else None
    arguments = arguments or arguments_of(tiny)
    want = tiny.pipe(**arguments)
    with hold(tiny.pipe) as pipe:
        for plan, other in (("cfg=2", "single"), ("patch=2", "cfg=2")):
            output, suspended = recorded(pipe, plan, **{**arguments, "generator": generator()})
            assert suspended.num_calls == 6
            assert relative_error(output, want) <= EXACT
            for count in (1, 3, 4):
                part = cut(suspended, count)
                again = pipe.submit(**{**arguments, "generator": generator()}, plan=plan, resume=part)
                assert relative_error(again.result(SECONDS), output) == 0.0
                elsewhere = pipe.submit(**{**arguments, "generator": generator()}, plan=other, resume=part)
                assert relative_error(elsewhere.result(SECONDS), want) <= EXACT


@pytest.mark.parametrize("plan", ["cfg=2", "patch=2"])
def test_a_controlnet_whose_outputs_are_not_gathered(hold: Hold, plan: str) -> None:
    """The rank that records reads no more of them than the other one, which would not answer."""
    tiny = build("sd_controlnet")
    arguments = arguments_of(tiny)
    want = tiny.pipe(**arguments)
    with hold(tiny.pipe) as pipe:
        output, suspended = recorded(pipe, plan, **{**arguments, "generator": generator()})
        assert relative_error(output, want) <= EXACT
        again = pipe.submit(**{**arguments, "generator": generator()}, plan=plan, resume=cut(suspended, 1))
        assert relative_error(again.result(SECONDS), output) == 0.0


@pytest.mark.breadth
def test_prompt_groups_each_have_their_calls(parallel: ParallelPipeline, caplog: pytest.LogCaptureFixture) -> None:
    arguments = {**CALL, "prompt": ["a house", "a tower"], "generator": [generator(0), generator(1)]}
    whole, suspended = recorded(parallel, "data=2", **arguments)
    assert (suspended.groups, suspended.num_calls) == (2, 4)
    again = parallel.submit(**arguments, plan="data=2", resume=cut(suspended, 2))
    assert relative_error(again.result(SECONDS), whole) == 0.0
    with caplog.at_level(logging.WARNING):
        other = parallel.submit(**arguments, plan="patch=2", resume=cut(suspended, 2)).result(SECONDS)
    assert relative_error(other, whole) <= EXACT
    assert "starts from its beginning: its prompts were in 2 groups, and are in 1 now" in caplog.text


@pytest.mark.breadth
def test_stale_values_are_not_kept(parallel: ParallelPipeline) -> None:
    """The first call after those of the record is exact."""
    plan = "patch=2,strategy=displaced:warmup_steps=1"
    _, suspended = recorded(parallel, plan, **CALL, generator=generator())
    job = parallel.submit(**CALL, plan=plan, resume=cut(suspended, 2), generator=generator())
    job.result(SECONDS)
    assert [(rank.exact_calls, rank.stale_calls) for rank in job.run.ranks] == [(1, 1)] * 2


@pytest.mark.breadth
def test_answers_of_a_callback_are_recorded(parallel: ParallelPipeline, tmp_path: Path) -> None:
    asked = []

    def halves(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        asked.append(step)
        pipe._guidance_scale = 3.0
        return {"latents": tensors["latents"] / 2}

    options = {**CALL, "callback_on_step_end": halves, "generator": generator()}
    whole, suspended = recorded(parallel, "patch=2", **options)
    assert asked == [0, 1, 2, 3]
    asked.clear()
    part = replace(cut(suspended, 2), answers=suspended.answers[:2])
    part.save(tmp_path / "call")
    job = parallel.submit(**options, plan="patch=2", resume=SuspendedCall.load(tmp_path / "call"))
    assert relative_error(job.result(SECONDS), whole) == 0.0
    assert asked == [2, 3]


@pytest.mark.parametrize("value", [object(), (1, 2)], ids=["no JSON", "another type in JSON"])
def test_what_a_callback_has_set_may_be_nothing_for_a_file(parallel: ParallelPipeline, value: object) -> None:
    def sets(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._of_callback = value
        return {}

    options = {**CALL, "callback_on_step_end": sets, "generator": generator()}
    whole, suspended = recorded(parallel, "patch=2", **options)
    assert (suspended.calls, suspended.answers) == ((), ())
    assert suspended.why_from_start == "its callback has changed the pipeline by more than plain values"
    again = parallel.submit(**{**options, "generator": generator()}, plan="patch=2", resume=suspended)
    assert relative_error(again.result(SECONDS), whole) == 0.0


def test_what_keeps_more_than_predictions_starts_from_the_beginning() -> None:
    tiny = build("flux")
    from diffusers import FirstBlockCacheConfig

    with ParallelPipeline(tiny.pipe, devices="cpu") as pipe:
        pipe.set_progress_bar_config(disable=True)
        tiny.pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
        whole, suspended = recorded(pipe, **arguments_of(tiny))
        assert suspended.calls == ()
        assert "transformer has a cache (FirstBlockCacheConfig)" in suspended.why_from_start
        again = pipe.submit(**arguments_of(tiny), resume=suspended).result(SECONDS)
    assert relative_error(again, whole) == 0.0


def written_to(sample: torch.Tensor, output: Any) -> Any:
    sample.mul_(1.0)
    return output


@pytest.mark.parametrize(
    ("forward", "limit", "count", "logged", "why"),
    [
        (lambda _, output: output, 2, 2, "its predictions take more than 16384 bytes", ""),
        (lambda _, output: (*output, object()), 9, 0, "a denoiser returns a object, which cannot be recorded", ""),
        (written_to, 9, 0, "", "UNet2DConditionModel changes its arguments"),
    ],
)
def test_what_is_not_recorded_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    forward: Callable[[torch.Tensor, Any], Any],
    limit: int,
    count: int,
    logged: str,
    why: str,
) -> None:
    """`limit`: predictions whose bytes are kept. `count`: those that are not made again."""
    tiny = build("sdxl")
    plain = tiny.pipe.unet.forward
    tiny.pipe.unet.forward = lambda sample, *args, **kwargs: forward(sample, plain(sample, *args, **kwargs))
    monkeypatch.setattr(call_recorder, "MOST_BYTES", limit * 8192)
    with ParallelPipeline(tiny.pipe, devices="cpu") as pipe, counted(tiny.pipe) as computed:
        pipe.set_progress_bar_config(disable=True)
        with caplog.at_level(logging.INFO, logger="patchpar.pipeline.call_journal"):
            whole, suspended = recorded(pipe, **arguments_of(tiny))
        total = computed.total()
        assert suspended.num_calls == count
        assert logged in caplog.text
        assert suspended.why_from_start == why
        computed.clear()
        again = pipe.submit(**arguments_of(tiny), resume=suspended).result(SECONDS)
        assert torch.equal(tensor_of(again), tensor_of(whole))
        assert computed.total() == total - count


class Ending(CallController):
    """Of a job that ends just after somebody has looked at it."""

    @property
    def journal(self) -> Any:
        found, self.left = self.left, None
        return found

    @journal.setter
    def journal(self, value: Any) -> None:
        self.left = value


def test_a_snapshot_of_a_job_that_ends_meanwhile() -> None:
    caller = Ending(None, {"prompt": "a fox"}, kind="inline", output_module="")
    caller.journal = CallJournal()
    state: Any = SimpleNamespace(described=SimpleNamespace(pipeline="P"))
    job = PipelineJob(state, caller, CallPlacement(rule=choose))
    found = job.snapshot()
    assert found is not None
    assert (found.pipeline, found.num_calls) == ("P", 0)
    assert job.snapshot() is None, "it has ended"


def test_calls_are_not_cleared_while_another_thread_reads_them() -> None:
    journal, threads = CallJournal(), list[threading.Thread]()

    class Group(dict[int, Any]):
        def __getitem__(self, number: int) -> Any:
            threads.append(threading.Thread(target=journal.clear, args=("others",)))
            threads[-1].start()
            threads[-1].join(0.05)
            return super().__getitem__(number)

    call = RecordedPrediction(number=0, group=0, checksum=1, form=None, tensors=())
    journal._by_group[0] = Group({0: call, 1: replace(call, number=1)})
    assert [each.number for each in journal.calls] == [0, 1]
    for thread in threads:
        thread.join()
    assert journal.calls == ()


def test_calls_are_known_up_to_the_first_that_is_missing_of_each_group() -> None:
    journal, call = CallJournal(), RecordedPrediction(number=0, group=0, checksum=1, form=None, tensors=())
    assert journal.begin(2) == ()
    for number, group in ((0, 0), (2, 0), (0, 1), (1, 1)):
        journal.add(replace(call, number=number, group=group))
    assert [(each.group, each.number) for each in journal.calls] == [(0, 0), (1, 0)]
    journal.add(replace(call, number=1))
    assert [(each.group, each.number) for each in journal.calls] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_tensors_of_a_file_are_numbered_from_0() -> None:
    table = TensorTable()
    assert table.add(TensorBytes(dtype="uint8", shape=(1,), stride=(1,), data=b"a")) == 0
    assert table.get(0).data == b"a"
    for number in (-1, "0", None):
        with pytest.raises(TypeError, match="is no number of a tensor"):
            table.get(number)


@pytest.fixture(scope="module")
def suspended_call() -> SuspendedCall:
    tiny = build("sdxl")
    with ParallelPipeline(tiny.pipe, devices="cpu") as pipe:
        pipe.set_progress_bar_config(disable=True)
        return recorded(pipe, **CALL, generator=generator())[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": "a green house"}, r"resume: argument 'prompt' is not that of the call which was suspended"),
        ({"num_inference_steps": 5}, r"argument 'num_inference_steps' is not"),
        ({"num_inference_steps": None}, r"argument 'num_inference_steps' is not"),
        ({"eta": 0.5}, r"argument 'eta' is not .*give the same arguments, or leave resume out"),
        ({"max_retries": -1}, r"max_retries=-1: use a whole number from 0"),
        ({"max_retries": True}, r"max_retries=True: use a whole number from 0"),
    ],
)
def test_other_arguments_are_refused(
    parallel: ParallelPipeline, suspended_call: SuspendedCall, changes: Any, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        parallel.submit(**{**CALL, "generator": generator(), **changes}, resume=suspended_call)


def test_another_pipeline_is_refused(suspended_call: SuspendedCall) -> None:
    with (
        ParallelPipeline(build("sd").pipe, devices="cpu") as pipe,
        pytest.raises(PlanError, match=r"is one of StableDiffusionXLPipeline, and this is a StableDiffusionPipeline"),
    ):
        pipe.submit(**CALL, generator=generator(), resume=suspended_call)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:100], "cannot be read as a suspended call"),
        (lambda data: data[:-8], "cannot be read as a suspended call: a tensor of shape"),
        (lambda data: b"", "cannot be read as a suspended call"),
        (lambda data: b"\xff" * 64, "cannot be read as a suspended call: its header has"),
        (lambda data: data.replace(b'\\"format\\": 1', b'\\"format\\": 9'), "no suspended call that this version"),
        (lambda data: data.replace(b'\\"groups\\"', b'\\"gruops\\"'), "no suspended call that this version can read"),
        (lambda data: data.replace(b"[2, 4, 16, 16]", b"[2, 4, 16, 99]"), "cannot be read as a suspended call"),
        (lambda data: data.replace(b"[1024, 256, 16, 1]", b"[9024, 256, 16, 1]"), "does not have 8192 bytes"),
    ],
)
def test_files_that_are_none(suspended_call: SuspendedCall, tmp_path: Path, damage: Any, says: str) -> None:
    path = tmp_path / "call"
    suspended_call.save(path)
    data = path.read_bytes()
    assert damage(data) != data
    path.write_bytes(damage(data))
    with pytest.raises(PlanError, match=says):
        SuspendedCall.load(path)


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        (CallbackChange("_guidance_scale", (3.0,)), True),
        (CallbackChange("set_ip_adapter_scale", (0.5,), {}), True),
        (CallbackChange("vae.enable_tiling", (), {}), True),
        (CallbackChange("save_pretrained", ("/etc",), {}), False),
        (CallbackChange("unet.load_lora_adapter", ("https://example.org",), {}), False),
        (CallbackChange("unet.enable_group_offload", ("cpu",), {"offload_to_disk_path": "/etc"}), False),
        (CallbackChange("unet.__class__.forward", (0,)), False),
        (CallbackChange("__class__", (0,)), False),
    ],
    ids=lambda value: getattr(value, "path", ""),
)
def test_a_file_calls_no_method_but_those_that_set(
    change: CallbackChange, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives somebody a file would have the pipeline write, load and download what it says."""
    answers = (CallbackResult(tensors={}, changes=(change,)),)
    suspended, path = SuspendedCall(pipeline="P", digests={}, answers=answers), tmp_path / "call"
    suspended.save(path)
    found = SuspendedCall.load(path)
    assert (found.answers, bool(found.why_from_start)) == ((answers, False) if is_kept else ((), True))
    with monkeypatch.context() as forged:
        forged.setattr(suspended_call_module, "_is_of_files", lambda change: True)
        suspended.save(path)
    if not is_kept:
        with pytest.raises(PlanError, match="no suspended call that this version can read"):
            SuspendedCall.load(path)


def test_outputs_of_other_libraries_are_not_built(
    suspended_call: SuspendedCall, caplog: pytest.LogCaptureFixture
) -> None:
    """A file names classes: only outputs of diffusers are imported."""
    form = {"output": ["os", "system"], "fields": {"command": {"value": "true"}}}
    calls = tuple(replace(call, form=form) for call in suspended_call.calls[:1])
    with ParallelPipeline(build("sdxl").pipe, devices="cpu") as pipe:
        pipe.set_progress_bar_config(disable=True)
        pipe.submit(**CALL, generator=generator(), resume=replace(suspended_call, calls=calls)).result(SECONDS)
    assert "os.system is no output of diffusers" in caplog.text
