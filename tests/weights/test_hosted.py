"""Hosted weights give the bits of whole ones, on one device and on several, and leave every bit as it was."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline, Plan
from patchpar.errors import PlanError, UnsupportedModel, WorkerDied
from patchpar.launch.inline import InlineContext
from patchpar.models.dry_run.dry_run import weight_bytes
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.pipeline.runner import PipelineRunner
from patchpar.shard.weights import host_store
from patchpar.shard.weights.packed import blocks_of
from patchpar.shard.weights.sharded import SLOTS
from tests import tiny
from tests.breadth import first_of
from tests.exact import denoisers
from tests.tiny.transformers import TRANSFORMERS
from tests.weights.networks import NETWORKS
from tests.weights.pipelines import SEED, STEPS, _run, _weights

DIVIDED = ("text_encoder", "text_encoder_2", "transformer")
ON_RANKS = "tests.weights.on_ranks"
CASES = [
    ("flux", "patch=1"),
    ("sdxl", "patch=1"),
    ("wan", "cfg=2"),
    ("wan", "cfg=2,patch=2"),
    ("sd3", "cfg=2,patch=2"),
    ("sdxl", "patch=3"),
    ("flux", "data=2"),
    ("flux", "patch=2,strategy=fresh-edges:warmup_steps=1"),
    ("wan", "cfg=2,patch=2,strategy=displaced:warmup_steps=1"),
    ("flux", "patch=2,strategy=pcpp:warmup_steps=1"),
    ("sdxl", "patch=2,strategy=pcpp:warmup_steps=1"),
]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("world", "slots", "resident", "kind"), [(1, 2, 0, "hosted"), (3, 2, 1, "hosted"), (2, 3, 0, "hosted apart")]
)
def test_same_bits_as_whole_weights(ranks: Any, name: str, world: int, slots: int, resident: int, kind: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:networks_with", world, name, slots, resident, kind):
        assert found["equal"] == [True] * 4
        assert found["restored"]
        assert found["outside"] == (["blocks.1", "blocks.4"] if name == "read outside" else [])


@pytest.mark.parametrize(
    "name", first_of([*TRANSFORMERS, *denoisers.KINDS], "FluxTransformer2DModel", "WanTransformer3DModel", "sdxl")
)
def test_networks_of_diffusers(ranks: Any, name: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:diffusers_network", 2, name, True, torch.float32, "hosted"):
        assert found["equal"] == [True, True]
        assert found["restored"]


def test_without_the_copies_it_is_wrong(ranks: Any) -> None:
    for found in ranks.run(
        f"{ON_RANKS}:diffusers_network", 2, "FluxTransformer2DModel", False, torch.float32, "hosted"
    ):
        assert found["equal"] == [False, False]


@pytest.mark.parametrize("world", [1, 2])
def test_bytes_are_copied_from_the_host_and_not_sent(ranks: Any, world: int) -> None:
    for found in ranks.run(f"{ON_RANKS}:bytes_of", world, "hosted"):
        assert found["sent"] == {}
        assert found["received"] == {"host": 2 * sum(found["shards"]) * world}
        assert found["rounds"] == {"host": 2 * 4}


def test_between_hosts_each_rank_copies_and_sends_its_part(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:bytes_of", 2, "hosted apart"):
        assert found["sent"] == {"weights": 2 * sum(found["shards"])}
        assert found["received"] == {"weights": 2 * sum(found["shards"]), "host": 2 * sum(found["shards"])}
        assert found["copied"] == 2 * 4, "the control: parts in slots are copied for the others"


@pytest.mark.parametrize(("name", "plan"), first_of(CASES, ("flux", "patch=1")))
def test_same_latents_as_whole_weights(ranks: Any, name: str, plan: str) -> None:
    world = Plan.parse(plan).world_size
    of_ranks = ranks.run("tests.weights.pipelines:both", 4, name, plan, None, "hosted")[:world]
    assert of_ranks[0]["equal"] == [True, True]
    for found in of_ranks:
        assert all(found["equal"]), "other ranks have latents with data=N alone"
        assert found["restored"]
        assert len(found["blocks"]) >= 2, "a denoiser and a text encoder"
        more_than_slots = any(count > SLOTS for _, count in found["blocks"].values())
        assert ("host" in found["received"]) == more_than_slots, "two blocks stay in their slots"
        assert "weights" not in found["sent"]


def test_one_device_in_this_process() -> None:
    built = tiny.build("flux")
    before = {key: x.clone() for key, x in _weights(built.pipe).items()}
    wanted = tiny.latents(built, steps=2)
    with ParallelPipeline(built.pipe, devices="cpu", plan="weights=hosted,resident=1") as pipe:
        found = pipe(
            **built.call_kwargs,
            num_inference_steps=2,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        ).images
        assert str(pipe.plan) == "weights=hosted,resident=1"
        assert pipe.last_run is not None
        assert pipe.last_run.ranks[0].bytes_received["host"] > 0
        in_a_slot = built.pipe.transformer.transformer_blocks[0].attn.to_q.weight.untyped_storage().nbytes()
        assert in_a_slot > before["transformer.transformer_blocks.0.attn.to_q.weight"].nbytes, "a view of a slot"
        pipe.restore()
    assert torch.equal(found, wanted)
    assert all(torch.equal(x, before[key]) for key, x in _weights(built.pipe).items())


@pytest.mark.breadth
@pytest.mark.parametrize("plan", ["patch=1", "patch=2"])
def test_adapters_come_and_go_beside_hosted_weights(ranks: Any, tmp_path: Path, plan: str) -> None:
    world = Plan.parse(plan).world_size
    first, *others = ranks.run("tests.weights.pipelines:adapted", 4, plan, str(tmp_path), "hosted")[:world]
    assert first["equal"] == [True] * 10
    assert first["differ"] == [False, True, True, True, False]
    for found in (first, *others):
        assert found["held"] == [3] * 4, "a transformer and two text encoders stay hosted"


@pytest.mark.breadth
def test_a_rank_killed_while_it_copies(ranks: Any) -> None:
    with pytest.raises(WorkerDied, match=r"rank 1 .*SIGKILL.*last exchange point 'weights of "):
        ranks.run("tests.weights.pipelines:killed", 4, "hosted")
    for found in ranks.run(f"{ON_RANKS}:after_an_exception", 2):  # on other workers
        assert all(found)


def test_weights_can_be_trained_after_calls_in_inference_mode(ranks: Any) -> None:
    (found,) = ranks.run(f"{ON_RANKS}:of_inference_mode", 1)
    assert not any(found)


def test_compiled_modules_are_refused(ranks: Any) -> None:
    for message in ranks.run(f"{ON_RANKS}:refused", 1, "compiled", "hosted"):
        assert "compiled modules" in message
        assert "compile its blocks instead" in message


def test_too_little_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchpar.shard.weights.host_store.free_memory", lambda: 1000)
    with pytest.raises(PlanError, match=r"iB of weights in host memory .*smaller dtype, use weights=sharded"):
        ParallelPipeline(tiny.build("flux").pipe, devices="cpu", plan="weights=hosted")


@pytest.mark.parametrize(
    ("of_ranks", "refused"),
    [
        ([("a", 600, 1000), ("a", 600, 1000)], "1.2 GiB of weights in host memory here, of which 1.0 GiB are free"),
        ([("a", 600, 2000), ("a", 600, 1000)], "of which 1.0 GiB are free"),  # another one has taken some meanwhile
        ([("a", 600, None), ("a", 600, 1000)], "of which 1.0 GiB are free"),
        ([("a", 600, 1000), ("b", 600, 1000)], ""),
        ([("a", 600, None), ("a", 600, None)], ""),
    ],
)
def test_host_memory_is_that_of_all_ranks_of_a_host(
    of_ranks: list[tuple[str, int, int | None]], refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = [[host, need * 2**30 // 1000, free and free * 2**30 // 1000] for host, need, free in of_ranks]
    gather = SimpleNamespace(of_bytes=lambda own: [json.dumps(each).encode() for each in facts])
    monkeypatch.setattr(host_store, "AllGather", lambda *_: gather)
    monkeypatch.setattr(host_store, "uncounted", lambda _: contextlib.nullcontext())
    mesh: Any = (None, None)
    with pytest.raises(PlanError, match=re.escape(refused)) if refused else contextlib.nullcontext():
        host_store.refuse_without_host_memory(1, mesh)


@pytest.mark.usefixtures("group_offload")
def test_offloading_beside_it_is_refused() -> None:
    built = tiny.build("flux")
    built.pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )
    with pytest.raises(UnsupportedModel, match=r"hooks that move its weights.*take the place of offloading"):
        ParallelPipeline(built.pipe, devices="cpu", plan="weights=hosted")


def test_whole_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = tiny.build("flux")
    with ParallelPipeline(built.pipe, devices="cpu", plan="weights=hosted") as pipe:
        monkeypatch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
        with pytest.raises(PlanError, match=r"iB when they are whole, more than is free.*close the pipeline"):
            pipe.restore()


def test_another_component_is_exchanged_without_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a network that is itself replaced have to fit; those of others stay in host memory."""
    built, plan = tiny.build("flux"), "weights=hosted"
    runner = PipelineRunner(InlineContext("cpu"))
    runner.adopt(built.pipe, Plan.parse(plan))
    wanted = _run(runner, built.call_kwargs, plan)
    monkeypatch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
    runner.set("vae", copy.deepcopy(built.pipe.vae))
    runner.set("vae.use_tiling", False)
    assert blocks_in_slots(built.pipe) == dict.fromkeys(DIVIDED, True)
    with pytest.raises(PlanError, match="the blocks of FluxTransformer2DModel take"):
        runner.set("transformer", torch.nn.Identity())
    found = _run(runner, built.call_kwargs, plan)
    assert found is not None
    assert wanted is not None
    assert all(map(torch.equal, found["latents"], wanted["latents"]))
    monkeypatch.undo()
    runner.set("transformer", tiny.build("flux").pipe.transformer)
    assert not blocks_in_slots(built.pipe)["transformer"]
    assert blocks_in_slots(built.pipe)["text_encoder"], "the control"
    found = _run(runner, built.call_kwargs, plan)
    assert found is not None
    assert all(map(torch.equal, found["latents"], wanted["latents"]))


def test_a_network_of_two_names_is_divided_once() -> None:
    pipe = tiny.build("flux").pipe
    pipe.register_modules(text_encoder_2=pipe.text_encoder)
    before = {key: x.clone() for key, x in _weights(pipe).items()}
    runner = PipelineRunner(InlineContext("cpu"))
    runner.adopt(pipe, Plan(weights="hosted"))
    assert blocks_in_slots(pipe) == dict.fromkeys(DIVIDED, True)
    runner.restore()
    assert blocks_in_slots(pipe) == dict.fromkeys(DIVIDED, False)
    assert all(torch.equal(x, before[key]) for key, x in _weights(pipe).items())


def test_a_network_of_two_pipelines_is_divided_by_one() -> None:
    """As of `from_pipe`: the weights that the second one would take are views of slots of the first."""
    built = tiny.build("flux")
    wanted = tiny.latents(built, steps=2)
    call = {**built.call_kwargs, "num_inference_steps": 2, "output_type": "latent"}
    other, divided = (
        type(built.pipe)(**built.pipe.components),
        r"divided by another ParallelPipeline.*restore\(\)",
    )

    def latents(pipe: ParallelPipeline) -> torch.Tensor:
        found: torch.Tensor = pipe(**call, generator=torch.Generator().manual_seed(0)).images
        return found

    with ParallelPipeline(built.pipe, devices="cpu", plan="weights=hosted") as first:
        with pytest.raises(PlanError, match=divided):
            ParallelPipeline(other, devices="cpu", plan="weights=hosted")
        assert torch.equal(latents(first), wanted)
        with ParallelPipeline(other, devices="cpu", plan="single") as second:
            second.plan = "weights=hosted"
            with pytest.raises(PlanError, match=r"another ParallelPipeline .*restore\(\) before"):
                latents(second)
            first.restore()
            assert torch.equal(latents(second), wanted)


def test_a_plan_that_is_refused_half_way_is_not_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without hooks, which is that of a new pipeline, is installed too."""
    built, install = tiny.build("flux"), InstalledPlan.install_denoisers
    runner, plan = PipelineRunner(InlineContext("cpu")), Plan(weights="hosted")
    wanted = tiny.latents(built, steps=STEPS)
    runner.adopt(built.pipe, plan)

    def refuse(installed: InstalledPlan, *args: Any) -> None:
        install(installed, *args)
        raise PlanError("half way")

    monkeypatch.setattr(InstalledPlan, "install_denoisers", refuse)
    kwargs = {**built.call_kwargs, "num_inference_steps": STEPS, "output_type": "latent"}
    with pytest.raises(PlanError, match="half way"):
        runner.generate(kwargs, CallOptions(plan=plan))
    found = runner.generate({**kwargs, "generator": torch.Generator().manual_seed(0)}, CallOptions(plan=Plan()))
    assert isinstance(found, CallResult)
    assert torch.equal(found.output.images, wanted)
    assert blocks_in_slots(built.pipe) == dict.fromkeys(DIVIDED, False)


def blocks_in_slots(pipe: Any) -> dict[str, bool]:
    """Whether weights of the first block of each divided network are views of a slot, by the network's name."""
    first = {name: next(iter(blocks_of(getattr(pipe, name)).values())) for name in DIVIDED}
    views = {name: next(block.parameters()) for name, block in first.items()}
    return {name: x.untyped_storage().nbytes() > x.numel() * x.element_size() for name, x in views.items()}


@pytest.mark.parametrize("is_called", [False, True])
def test_weights_that_do_not_fit_together_stay_where_they_are(monkeypatch: pytest.MonkeyPatch, is_called: bool) -> None:
    """Not those of one network alone, which would fit; the plan goes on, and may end when there is room."""
    built = tiny.build("flux")
    before = {key: x.clone() for key, x in _weights(built.pipe).items()}
    room = max(weight_bytes(getattr(built.pipe, name)) for name in DIVIDED)
    runner, plan = PipelineRunner(InlineContext("cpu")), "weights=hosted"
    runner.adopt(built.pipe, Plan.parse(plan))
    wanted = _run(runner, built.call_kwargs, plan) if is_called else None
    monkeypatch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: room)
    for refused in (runner.restore, partial(runner.apply, "fuse_lora", (), {})):
        with pytest.raises(PlanError, match=r"blocks of \w+, \w+.* take .*iB when they are whole"):
            refused()
        assert blocks_in_slots(built.pipe) == dict.fromkeys(DIVIDED, True)
    found = _run(runner, built.call_kwargs, plan)
    assert found is not None
    assert found["received"]["host"] > 0
    monkeypatch.undo()
    runner.restore()
    assert all(torch.equal(x, before[key]) for key, x in _weights(built.pipe).items())
    if wanted is not None:
        assert found["received"] == wanted["received"]
        assert all(map(torch.equal, found["latents"], wanted["latents"]))


def test_another_plan_of_the_same_ranks_takes_over_what_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where whole weights would not fit; a plan that divides them otherwise is refused, and the first goes on."""
    built, latents = tiny.build("flux"), []
    before = {key: x.clone() for key, x in _weights(built.pipe).items()}
    runner = PipelineRunner(InlineContext("cpu"))
    runner.adopt(built.pipe)
    hosted, changed = CallOptions(plan=Plan(weights="hosted"), verify=False), {"vae": "tiled"}
    for number, options in enumerate((hosted, replace(hosted, **changed), hosted)):
        if number:
            monkeypatch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
        call = {**built.call_kwargs, "num_inference_steps": 1, "output_type": "latent"}
        found = runner.generate({**call, "generator": torch.Generator().manual_seed(0)}, options)
        assert isinstance(found, CallResult)
        latents.append(found.output.images)
        assert blocks_in_slots(built.pipe) == dict.fromkeys(DIVIDED, True)
        if number:
            with pytest.raises(PlanError, match="when they are whole"):
                runner.generate(call, CallOptions(plan=Plan(), verify=False))
    assert all(torch.equal(each, latents[0]) for each in latents)
    monkeypatch.undo()
    runner.restore()
    assert all(torch.equal(x, before[key]) for key, x in _weights(built.pipe).items())


def test_methods_that_need_no_weights_leave_them_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    built, plan = tiny.build("flux"), "weights=hosted"
    runner = PipelineRunner(InlineContext("cpu"))
    runner.adopt(built.pipe, Plan.parse(plan))
    _run(runner, built.call_kwargs, plan)
    monkeypatch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
    for name in ("vae.enable_tiling", "vae.disable_tiling", "scheduler.set_shift", "enable_lora"):
        runner.apply(name, (1.0,) if name == "scheduler.set_shift" else (), {})
    assert blocks_in_slots(built.pipe) == dict.fromkeys(DIVIDED, True)
    for name in ("transformer.half", "text_encoder_2.half", "fuse_lora"):  # the control
        with pytest.raises(PlanError, match=f"{name}\\(\\) may read or change any weight"):
            runner.apply(name, (), {})


@pytest.mark.parametrize("name", ["transformer", "text_encoder_2"])
def test_a_first_call_that_fails_leaves_weights_divided(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A failure says nothing of code that reads weights outside of their blocks."""
    built, plan = tiny.build("flux"), "weights=hosted"
    before = {key: x.clone() for key, x in _weights(built.pipe).items()}
    wanted = tiny.latents(built, seed=SEED, steps=STEPS)
    runner = PipelineRunner(InlineContext("cpu"))
    runner.adopt(built.pipe, Plan.parse(plan))
    last = list(blocks_of(getattr(built.pipe, name)).values())[-1]
    failing = last.register_forward_pre_hook(lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        _run(runner, built.call_kwargs, plan)
    failing.remove()
    assert blocks_in_slots(built.pipe) == dict.fromkeys(DIVIDED, True)
    found = _run(runner, built.call_kwargs, plan)
    assert found is not None
    assert found["received"]["host"] > 0
    assert torch.equal(found["latents"][0], wanted)
    runner.restore()
    assert all(torch.equal(x, before[key]) for key, x in _weights(built.pipe).items())


def test_adapters_that_were_there_before_their_weights_were_divided_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig

    built, alone = tiny.build("flux"), tiny.build("flux")
    for each in (built, alone):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            each.pipe.transformer.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q"]))
    wanted = [tiny.latents(alone, steps=1)]
    alone.pipe.unload_lora_weights()
    wanted.append(tiny.latents(alone, steps=1))
    with ParallelPipeline(built.pipe, devices="cpu", plan="weights=hosted") as pipe:
        monkeypatch.setattr("patchpar.shard.weights.stores.free_bytes", lambda device: 1000)
        call = {**built.call_kwargs, "num_inference_steps": 1, "output_type": "latent"}
        found = [pipe(**call, generator=torch.Generator().manual_seed(0)).images]
        pipe.unload_lora_weights()
        found.append(pipe(**call, generator=torch.Generator().manual_seed(0)).images)
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(*found)
