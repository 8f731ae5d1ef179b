"""A plan is recorded once for a model, a call and a version; a kept one needs neither torch nor diffusers."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diffusers import EulerDiscreteScheduler, HeunDiscreteScheduler

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.files import embedded_model
from patchpar.pipeline.planner import forecast as forecast_module
from patchpar.pipeline.planner.empty_model import EmptyModel
from patchpar.pipeline.planner.forecast import PlanForecasts
from patchpar.pipeline.planner.image_ranks import ImageRanks, ranks_of_image
from patchpar.pipeline.planner.kept_tapes import CallFacts, KeptTapes
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.plan.plan import Plan
from patchpar.plan.replay.fold import replay_groups
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.tape import Boundary, Operator, Send, Wait
from patchpar.plan.replay.topology import Topology
from patchpar.shard import verification_cache
from patchpar.shard.verification_cache import VerificationCache

PLAN = Plan(patch=2)
CALL = {"height": 64}
WITHOUT_TORCH = """
import sys
from pathlib import Path
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.plan.plan import Plan
from patchpar.shard.verification_cache import VerificationCache
files = VerificationCache(Path({folder!r}))
found = Simulator("embedded", "2xH100", {{"torch_dtype": "float16"}}, {{"height": 64}}, files)
print(found.of(Plan(patch=2)).seconds, "torch" in sys.modules)
"""
OPERATOR = Operator("addmm", "float16", 2 * 512**3, 3 * 2 * 512**2, (512, 512, 512))


def ranks_of(plan: Plan) -> ImageRanks:
    def record(rank: int) -> RecordedRank:
        exchange = (Send(0, (1 - rank,), "kv", 8, "attn"), Wait(0, 1 - rank, 8, "attn", "kv")) if plan.patch > 1 else ()
        steps = (Boundary("step 0", is_step=True), OPERATOR, *exchange, Boundary("decode", is_step=True))
        peaks, working = {"denoise": 10 + rank}, {"denoise": 15 + rank}
        return RecordedRank(rank=rank, tape=steps, peaks=peaks, working=working, weight_bytes={"unet": 100})

    return ranks_of_image(plan, record)


def tapes_in(folder: Path, **call: Any) -> KeptTapes:
    return KeptTapes.of(embedded_model(), {}, CALL | call, files=VerificationCache(folder))


def test_ranks_and_refusals_are_found_again(tmp_path: Path) -> None:
    tapes, found = tapes_in(tmp_path), ranks_of(PLAN)
    assert tapes.find(PLAN) is None
    tapes.keep(PLAN, found)
    tapes.keep(Plan(patch=3), UnsupportedModel("two bands at most"))
    tapes.keep_call(CallFacts(branches=2, steps=30))
    again = tapes_in(tmp_path)
    assert again.find(PLAN) == found
    assert isinstance(again.find(Plan(patch=3)), UnsupportedModel)
    assert again.call() == CallFacts(branches=2, steps=30)
    assert again.find(Plan(cfg=2)) is None
    assert tapes_in(tmp_path, height=128).find(PLAN) is None


def test_another_version_is_recorded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tapes_in(tmp_path).keep(PLAN, ranks_of(PLAN))
    monkeypatch.setattr(verification_cache, "versions", lambda: {"torch": "99"})
    assert tapes_in(tmp_path).find(PLAN) is None


@pytest.mark.parametrize("name", ["scheduler/scheduler_config.json", "tokenizer/merges.txt", "unet/block.py"])
def test_another_file_of_the_model_is_recorded_anew(tmp_path: Path, name: str) -> None:
    """Not another file of weights."""
    file, weights = tmp_path / "model" / name, tmp_path / "model/unet/diffusion_pytorch_model.safetensors"
    for each in (file, weights):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("{}")
    files = VerificationCache(tmp_path / "kept")
    KeptTapes.of(tmp_path / "model", {}, CALL, files=files).keep(PLAN, ranks_of(PLAN))
    weights.write_text("other weights")
    assert KeptTapes.of(tmp_path / "model", {}, CALL, files=files).find(PLAN) is not None
    file.write_text('{"other": 1}')
    assert KeptTapes.of(tmp_path / "model", {}, CALL, files=files).find(PLAN) is None


def test_what_is_kept_is_found_unless_it_is_to_be_fresh(tmp_path: Path) -> None:
    """What is found anew is kept in its place."""
    fresh = KeptTapes.of(embedded_model(), {}, CALL, files=VerificationCache(tmp_path), fresh=True)
    for refused in ("two bands", "three bands"):
        fresh.keep(PLAN, UnsupportedModel(refused))
        assert fresh.find(PLAN) is None
        assert str(tapes_in(tmp_path).find(PLAN)) == refused


def test_a_broken_file_is_recorded_anew(tmp_path: Path) -> None:
    tapes = tapes_in(tmp_path)
    tapes.keep(PLAN, ranks_of(PLAN))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace("tape", "tap"))
    assert tapes.find(PLAN) is None


def test_what_is_known_of_a_call_are_two_numbers(tmp_path: Path) -> None:
    tapes = tapes_in(tmp_path)
    tapes.keep_call(CallFacts(branches=2, steps=30))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace(": 30", ': "30"'))
    assert tapes.call() is None


@pytest.mark.parametrize("scheduler", [EulerDiscreteScheduler, HeunDiscreteScheduler])
def test_the_steps_of_a_call_are_those_of_its_scheduler(scheduler: Any) -> None:
    """One of second order calls the denoiser twice in each step but one."""
    model = EmptyModel(embedded_model(), {}, {**CALL, "num_inference_steps": 5})
    model._pipe.scheduler = scheduler()
    model._pipe.scheduler.set_timesteps(5)
    assert model.call.steps == len(model._pipe.scheduler.timesteps)


def test_a_call_with_tensors_is_not_kept(tmp_path: Path) -> None:
    tapes = tapes_in(tmp_path, prompt_embeds=object())
    tapes.keep(PLAN, ranks_of(PLAN))
    assert tapes.find(PLAN) is None
    assert not list(tmp_path.iterdir())


def test_orders_of_devices_with_the_same_links_have_one_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on eight cards whose messages pass the memory of one root of four cards, or of both."""
    replays: list[Topology] = []

    def replayed(tapes: Any, groups: int, topology: Topology, pairs: Any) -> Any:
        replays.append(topology)
        return replay_groups(tapes, groups, topology, pairs)

    monkeypatch.setattr(forecast_module, "replay_groups", replayed)
    machine = Machine.parse("8xRTX4090")
    forecasts = PlanForecasts(ranks_of(PLAN), PLAN, machine, steps=1, warm_up_steps=0)
    found = {order: forecasts.on(order) for order in permutations(range(8), 2)}
    assert len(replays) == 2
    for order in ((0, 1), (3, 4), (7, 2)):
        again = PlanForecasts(ranks_of(PLAN), PLAN, machine, steps=1, warm_up_steps=0)
        assert again.on(order) == found[order]
        assert again.on(order).order == order


def simulator(folder: Path) -> Simulator:
    return Simulator("embedded", "2xH100", {"torch_dtype": "float16"}, CALL, VerificationCache(folder))


def test_what_is_kept_is_not_recorded(tmp_path: Path) -> None:
    first, again = simulator(tmp_path), simulator(tmp_path)
    asked: list[Plan] = []

    def ranks(plan: Plan, steps: int) -> ImageRanks:
        asked.append(plan)
        if plan.cfg > 1:
            raise PlanError("no guidance")
        return ranks_of(plan)

    first.__dict__["_model"] = SimpleNamespace(call=CallFacts(branches=1, steps=4), ranks=ranks)
    again.__dict__["_model"] = None
    found = first.of(PLAN)
    assert again.of(PLAN).as_dict() == found.as_dict()
    for each in (first, again):
        with pytest.raises(PlanError, match="no guidance"):
            each.of(Plan(cfg=2))
    assert asked == [PLAN, Plan(cfg=2)]
    code = WITHOUT_TORCH.format(folder=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(ran.stdout.split()[0]) == found.seconds
    assert ran.stdout.split()[1] == "False"
