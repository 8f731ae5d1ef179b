"""With sharded weights a rank never holds the whole model, and its weights are those of plain loading."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.weights.__main__ import memory_of
from benchmarks.weights.model import save_model
from patchpar.comm.collectives import Communicator
from patchpar.errors import ExchangeError
from patchpar.launch.remote_errors import take_down
from patchpar.models.deferred_casts import DeferredCasts
from patchpar.models.files import floating_dtypes
from patchpar.models.loading import load_pipeline, with_dtype
from patchpar.pipeline.held_weights import HeldWeights
from patchpar.plan.plan import Plan
from patchpar.shard.weights.device_shards import DeviceShards
from tests.tiny import build
from tests.unit.threads import on_threads
from tests.weights.loading import FILES, saved

PLAN = Plan(patch=2, weights="sharded")
PHASES = ("loading", "first", "generating")
HEAP = 16 * 2**20
"""Bytes that the C library keeps of freed memory, at most; benchmarks/weights has a model that is large beside it."""


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("flux", tmp_path_factory.mktemp("flux") / "model")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("large") / "model"
    save_model(folder, heads=4, double=1, single=20, dtype=torch.bfloat16)
    return str(folder)


def no_comm() -> Any:
    raise AssertionError("a rank asks no other one while it loads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shards_of_all_ranks_are_the_bytes_of_the_model(flux: str, dtype: torch.dtype) -> None:
    """In the dtype of the files they are not copied from these."""
    plain = load_pipeline(flux, with_dtype({"torch_dtype": dtype}))
    ranks = [HeldWeights(rank, torch.device("cpu"), no_comm) for rank in range(2)]
    pipes = [rank.load(flux, {"torch_dtype": dtype}, PLAN) for rank in ranks]
    for name, networks in {key: [pipe.components[key] for pipe in (plain, *pipes)] for key in plain.components}.items():
        held = [rank._held.get(network) for rank, network in zip(ranks, networks[1:], strict=True)]
        if not all(held):
            assert name not in ("transformer", "text_encoder", "text_encoder_2")
            continue
        of_plain, in_blocks = dict(networks[0].named_parameters()), set[int]()
        for index, block in enumerate(held[0].blocks):
            whole = torch.cat([weights.store._shards[index] for weights in held])
            names = {id(x): path for path, x in networks[1].named_parameters()}
            assert all((index in weights.store._in_files) == (dtype == FILES) for weights in held)
            for packed in block.tensors:
                if id(packed.tensor) in names:
                    found = packed.tensor if dtype == FILES else packed.view(whole)
                    assert torch.equal(found, of_plain[names[id(packed.tensor)]])
                    in_blocks.add(id(packed.tensor))
        outside = {path: x for path, x in networks[1].named_parameters() if id(x) not in in_blocks}
        assert in_blocks
        assert outside
        assert all(torch.equal(x, of_plain[path]) for path, x in outside.items())
        assert all(x.dtype == of_plain[path].dtype for path, x in networks[1].named_parameters())


@pytest.mark.parametrize(("dtype", "noted"), [(torch.float32, False), (torch.float16, True)])
def test_casts_are_looked_for_only_where_there_are_some(
    flux: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, noted: bool
) -> None:
    """The mode that notes them takes longer for each tensor than to map it."""
    found, plain = [], DeferredCasts.loading
    monkeypatch.setattr(DeferredCasts, "loading", lambda casts: found.append(casts) or plain(casts))
    HeldWeights(0, torch.device("cpu"), no_comm).load(flux, {"torch_dtype": dtype}, PLAN)
    assert bool(found) == noted
    assert floating_dtypes(Path(flux)) == {"float32"}


def test_casts_are_noted_and_made_later(flux: str) -> None:
    casts = DeferredCasts()
    with casts.loading():
        pipe = load_pipeline(flux, with_dtype({"torch_dtype": torch.bfloat16}))
    noted = [cast for cast in casts._casts.values() if cast.storage() is not None]
    of_large = [x for x in pipe.transformer.parameters() if x.numel() * 4 >= 2**14]
    assert len(noted) > len(of_large) > 10, "weights of the transformer, and of text encoders from threads"
    plain = load_pipeline(flux, with_dtype({"torch_dtype": torch.bfloat16}))
    x, wanted = pipe.transformer.context_embedder.weight, plain.transformer.context_embedder.weight
    casts.finish()
    assert torch.equal(x, wanted)
    for found, same in zip(pipe.text_encoder_2.parameters(), plain.text_encoder_2.parameters(), strict=True):
        assert torch.equal(found, same)


def test_what_is_read_while_loading_is_cast_before() -> None:
    casts, x = DeferredCasts(), torch.randn(200, 100)
    with casts.loading():
        halves = [x.to(torch.float16) for _ in range(3)]
        assert len(casts._casts) == 3
        doubled = halves[0] * 2
        x.zero_()  # of which two casts are missing
    assert not casts._casts
    assert bool(halves[1].any())
    assert torch.equal(halves[0], halves[2])
    assert torch.equal(doubled, halves[1] * 2)


@pytest.mark.breadth  # bytes of shards are compared in every run, and latents of shards
@pytest.mark.parametrize(
    ("dtype", "plan"),
    [
        (torch.float32, "patch=2,weights=sharded"),
        (torch.float16, "cfg=2,weights=sharded,resident=1"),
        (torch.float16, "cfg=2,patch=2,weights=sharded"),
        (torch.float32, "patch=2,weights=hosted"),
        (torch.float32, "stage=2,weights=hosted"),
        (torch.bfloat16, "patch=1,weights=hosted"),
    ],
)
def test_same_latents_as_whole_weights(ranks: Any, flux: str, dtype: torch.dtype, plan: str) -> None:
    found = [each for each in ranks.run("tests.weights.loading:loaded", 4, "flux", flux, dtype, plan) if each]
    assert found[0]["equal"]
    for each in found:
        assert each["held"] == 3, "a transformer and two text encoders, before the first call"
        assert all(each["equal"])
        assert each["restored"]


def test_methods_before_the_first_call(flux: str) -> None:
    """Those that need no values of weights leave them in shards; any other makes them whole, bit for bit."""
    plain, comms = load_pipeline(flux, {}), dict[int, Communicator]()
    ranks = [HeldWeights(rank, torch.device("cpu"), partial(comms.__getitem__, rank)) for rank in range(2)]
    pipes = [rank.load(flux, {}, PLAN) for rank in ranks]

    def on_rank(transport: Any) -> tuple[bool, bool, bool]:
        comms[transport.rank] = Communicator(transport)
        held, pipe = ranks[transport.rank], pipes[transport.rank]
        for name in ("disable_lora", "vae.enable_slicing", "transformer.enable_cache"):
            held.give_back_for(name)
        kept = len(held._held) == 3
        held.give_back_for("transformer.fuse_qkv_projections")
        same = zip(pipe.transformer.parameters(), plain.transformer.parameters(), strict=True)
        return kept, not held._held, all(torch.equal(x, y) for x, y in same)

    assert on_threads(2, on_rank, deadline=30.0) == [(True, True, True)] * 2


def test_a_rank_without_memory_for_its_shards_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for it up to the deadline. What has moved is lost, so that the ranks are started anew."""
    comms = dict[int, Communicator]()
    ranks = [HeldWeights(rank, torch.device("cpu"), partial(comms.__getitem__, rank)) for rank in range(2)]
    pipes, keep = [build("flux").pipe for _ in ranks], DeviceShards.keep

    def without_memory(store: DeviceShards, index: int, copy: Any) -> None:
        if store.axis.rank == 1:
            raise torch.OutOfMemoryError("20 GiB")
        keep(store, index, copy)

    def on_rank(transport: Any) -> tuple[str, bool]:
        comms[transport.rank] = Communicator(transport)
        try:
            ranks[transport.rank].hold(pipes[transport.rank], PLAN)
        except (ExchangeError, torch.OutOfMemoryError) as error:
            return f"{type(error).__name__}: {error}", take_down(error).left_changes
        return "it holds them", False

    monkeypatch.setattr(DeviceShards, "keep", without_memory)
    others = ("ExchangeError: another rank has failed while its blocks moved into shards", True)
    assert on_threads(2, on_rank, deadline=30.0) == [others, ("OutOfMemoryError: 20 GiB", True)]


@pytest.mark.breadth
def test_methods_and_other_plans_before_the_first_call(ranks: Any, flux: str) -> None:
    plan = "patch=2,weights=sharded"
    for found in ranks.run("tests.weights.loading:changed_before_the_first_call", 4, flux, plan)[:2]:
        assert found == {"kept": {"needs none": True, "needs all": False}, "whole": True, "other plan": True}


@pytest.mark.breadth  # bytes of shards are compared in every run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_private_memory_of_a_rank(large: str, dtype: torch.dtype) -> None:
    """What whole weights take, but only W/n and slots of W, and 10 %: while loading, in the first call and the next.

    Of new workers: those of a pool have memory that they used before.
    """
    files = sum(file.stat().st_size for file in Path(large).rglob("*.safetensors"))  # in bfloat16
    of_whole = 0 if dtype == torch.bfloat16 else files * dtype.itemsize / 2  # a CPU maps files in their own dtype
    plain, found = (memory_of(large, 2, dtype, kind) for kind in ("whole", "sharded"))
    more = files * dtype.itemsize / 2 * (1 / 2 + 1 / 10) + found["slots"] + HEAP
    limits = {phase: plain[phase] - of_whole + more for phase in PHASES}
    assert all(found[phase] <= limits[phase] for phase in PHASES), (found, limits)
    assert not of_whole or all(plain[phase] > limits[phase] for phase in PHASES), "whole weights keep the limit"


@pytest.mark.breadth
def test_private_memory_of_a_rank_beside_weights_of_the_host(large: str) -> None:
    """Slots and 10 % of W in every call: what the first one takes beyond that is W/n in the memory of the host.

    The system counts it as the process's own until another rank has read it, and nobody's from then on.
    """
    files = sum(file.stat().st_size for file in Path(large).rglob("*.safetensors"))
    plain, found = (memory_of(large, 2, torch.bfloat16, kind) for kind in ("whole", "hosted"))
    more = files / 10 + HEAP  # whole weights in this dtype are pages of the files
    assert found["loading"] <= plain["loading"] + more + files / 2
    assert 0.9 * files / 2 < found["unshared"] <= files / 2 + HEAP
    assert found["first"] - found["unshared"] <= plain["first"] + found["slots"] + more
    assert found["generating"] <= plain["generating"] + found["slots"] + more
    assert found["unshared after"] < HEAP
