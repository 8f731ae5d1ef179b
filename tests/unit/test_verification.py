"""Which calls are alike, so that what was verified for one holds for the other."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.pipeline.installed_weights import ranks_of_plain_call
from patchpar.plan.mesh import Axis, Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.fingerprint import fingerprint
from patchpar.shard.foreign.check import ForeignCheck
from patchpar.shard.foreign.guarded_call import GuardedCall
from patchpar.shard.tensor.agreed_cache import agreed
from patchpar.shard.verification import (
    ROUNDINGS,
    Comparison,
    arguments_of,
    call_signature,
    largest_error,
    relative_error,
    verify_once,
)
from patchpar.shard.verification_cache import VerificationCache
from tests.unit.threads import on_threads


class Foreign(torch.nn.Module):
    """Not one of diffusers' or of this package."""


def call(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.zeros(1, 4, 8, 8),), {"timestep": 900, "use_cross_timestep": False, "num_frames": 3} | changes


@pytest.mark.parametrize(
    "change", [{"use_cross_timestep": True}, {"num_frames": 4}, {"timestep": torch.zeros(1)}, {"added": 2}]
)
def test_what_changes_the_computation_is_another_call(change: dict[str, Any]) -> None:
    """Also a switch that has "timestep" in its name: LTX-2's, which gives each token a time of its own."""
    assert call_signature(call(**change)) != call_signature(call())
    assert arguments_of(call(**change)) != arguments_of(call())


@pytest.mark.parametrize("step", [1, 12.5])
def test_another_step_is_the_same_call(step: float) -> None:
    assert call_signature(call(timestep=step)) == call_signature(call())
    assert arguments_of(call(timestep=step)) == arguments_of(call())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_infinitely_wrong(wrong: float) -> None:
    """The largest of several errors would hide NaN."""
    error = relative_error(torch.tensor([1.0, wrong]), torch.ones(2))
    assert max(0.0, error) == max(error, 0.0) == math.inf


def test_an_error_that_is_no_number_is_above_every_limit() -> None:
    def run(transport: Any) -> float:
        mesh = Communicator(transport), Axis("patch", transport.rank, 2, (0, 1))
        return largest_error(mesh, [[Comparison(math.nan if transport.rank else 0.0, 1.0)]], "Linear in bands")

    assert [type(each) for each in on_threads(2, run)] == [VerificationError] * 2


@pytest.mark.parametrize("differ", [True, False])
def test_ranks_with_different_networks_are_refused_on_all_of_them(tmp_path: Path, differ: bool) -> None:
    def run(transport: Any) -> float:
        cache = VerificationCache(tmp_path / str(transport.rank))
        mesh = Communicator(transport), Axis("patch", transport.rank, 2, (0, 1))
        facts = {"denoiser": "Linear", "fingerprint": transport.rank if differ else 0}
        counted = mesh[0].traffic
        try:
            return verify_once(cache, facts, mesh, lambda: [[Comparison(0.0, 1.0)]], "Linear in bands")
        finally:
            assert mesh[0].traffic is counted
            assert counted.total_bytes == 0, "these exchanges are no part of a call"

    found = on_threads(2, run)
    if differ:
        assert [type(each) for each in found] == [UnsupportedModel] * 2
        assert all("the ranks hold different networks" in str(each) for each in found)
    else:
        assert found == [0.0] * 2


def test_a_network_is_the_same_when_what_was_loaded_into_it_is_unloaded() -> None:
    """diffusers leaves None in its place; a worker that is started later has never had it."""
    before, network = fingerprint(torch.nn.Linear(1, 1)).digest, torch.nn.Linear(1, 1)
    network.encoder_hid_proj = torch.nn.Identity()
    assert fingerprint(network).digest != before
    network.encoder_hid_proj = None
    assert fingerprint(network).digest == before
    network.s1 = 0.9
    assert fingerprint(network).digest != before


def replaced_by(forward: Any) -> str:
    """Return the digest of a network with that forward."""
    network = torch.nn.Linear(1, 1)
    network.forward = forward
    return fingerprint(network).digest


def with_a_mode(x: Any, mode: str = "rows") -> Any:
    return x if mode == "rows" else x - x.mean()


def defaults_to(mode: str) -> Any:
    def forward(x: Any, mode: str = mode) -> Any:
        return with_a_mode(x, mode)

    return forward


def defaults_by_name_to(mode: str) -> Any:
    return lambda x, *, mode=mode: with_a_mode(x, mode)


def bound_to(mode: str) -> Any:
    return partial(with_a_mode, mode=mode)


@pytest.mark.parametrize("made", [bound_to, defaults_to, defaults_by_name_to])
def test_what_a_function_holds_is_part_of_a_network(made: Any) -> None:
    """Arguments bound by name and defaults, as a closure is: by them one forward may do what another does not."""
    assert replaced_by(made("rows")) == replaced_by(made("rows")) != replaced_by(made("all"))


def test_a_function_that_holds_itself_is_read_once() -> None:
    def recursive(start: int) -> Any:
        def forward(x: Any, left: int = start) -> Any:
            return forward(x, left - 1) if left else x

        return forward

    assert replaced_by(recursive(2)) == replaced_by(recursive(2)) != replaced_by(recursive(3))


def test_a_verification_under_autocast_is_of_calls_under_it(tmp_path: Path) -> None:
    """Its limit is that of a dtype that rounds more."""
    compared, verifications = list[str](), VerificationCache(tmp_path)

    def on_rank(transport: Any) -> None:
        mesh = Communicator(transport), Axis("patch", 0, 1, (0,))

        def verified(what: str) -> None:
            def compare() -> Any:
                compared.append(what)
                yield [Comparison(1e-6, 1e-4)]

            verify_once(verifications, {"denoiser": "Linear"}, mesh, compare, "Linear")

        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                verified("under autocast")
            verified("without")

    assert on_threads(1, on_rank) == [None]
    assert compared == ["under autocast", "without"]


def test_ranks_compare_foreign_code_with_as_many_plain_calls() -> None:
    """Also where the error of one is above the limit: each may gather weights that the others have."""

    def calls(transport: Any) -> int:
        mesh = Communicator(transport), Axis("patch", transport.rank, 2, (0, 1))
        check, made, want = ForeignCheck(torch.nn.Linear(1, 1), mesh, None), list[Any](), torch.ones(3)

        def plain(seed: int) -> torch.Tensor:
            made.append(AllGather(*mesh, "weights", "a block").same(torch.zeros(1)))
            return want

        guarded: Any = SimpleNamespace(shaken=plain)
        before: Any = SimpleNamespace(put_back=lambda: None)
        found = check._judged(guarded, before, want + transport.rank, want)
        assert (found.error > found.limit) == (transport.rank == 1)
        return len(made)

    assert on_threads(2, calls) == [ROUNDINGS, ROUNDINGS]


def test_a_plain_call_with_foreign_code_that_does_not_fit_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    """At once: none waits for the comparison, which the one without memory cannot make."""

    def calls(transport: Any) -> str:
        mesh = Communicator(transport), Axis("patch", transport.rank, 2, (0, 1))
        network, want = Foreign(), torch.ones(3)
        check = ForeignCheck(network, mesh, VerificationCache(tmp_path))
        check.look(fingerprint(network))

        def plain() -> torch.Tensor:
            if transport.rank == 1:
                raise torch.OutOfMemoryError("too little")
            return want

        call = GuardedCall(
            form="a form",
            split=lambda: want,
            plain=plain,
            cuts=list,
            what="Foreign",
            mixed="tokens",
            way_out="use one device",
        )
        with pytest.raises(PlanError, match=r"memory of every rank, nor is there one .*verify=False") as refused:
            check.run(call)
        return str(refused.value)

    first, second = on_threads(2, calls)
    assert first == second


@pytest.mark.parametrize(
    ("text", "collective", "ranks"),
    [
        ("cfg=2,patch=2", False, (0, 1)),
        ("cfg=2,patch=2,weights=sharded", True, (0, 1, 2, 3)),  # also those of the other branch have a part of weights
        ("cfg=2,patch=2,weights=hosted", False, (0, 1)),
        ("patch=2,tensor=2", False, (0, 1, 2, 3)),  # features of all are added up
    ],
)
def test_ranks_that_take_part_in_a_plain_call_agree_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, collective: bool, ranks: tuple[int, ...]
) -> None:
    """On what is known of a denoiser, as home folders of nodes differ, and on the number of calls."""
    plan, installed = Plan.parse(text), InstalledPlan()
    mesh = Mesh(0, range(4), **plan.degrees())
    comm: Any = SimpleNamespace()
    installed.mesh, installed.comm = mesh, comm
    weights: Any = None if plan.weights == "whole" else SimpleNamespace(is_collective=collective)
    installed.weights = weights
    given: dict[str, Any] = {}

    def install(*_: Any, **options: Any) -> Any:
        given.update(options)
        return SimpleNamespace(denoiser=module, know=lambda states: given.update(known=[*states]))

    monkeypatch.setattr(type(plan.strategy), "install", install)
    module, state, cache = torch.nn.Identity(), object(), VerificationCache(tmp_path)
    monkeypatch.setattr(installed.known, "_states", {module: (state,)})
    found = installed._in_patches(module, plan, StepClock(), cache)
    others = collective or plan.tensor > 1
    assert given.get("known", []) == ([] if others else [state]), "a rank that was started anew would search alone"
    assert found.together == (comm, ranks_of_plain_call(plan, mesh, weights))
    assert found.together[1].ranks == ranks
    known = given["verifications"]
    assert known.folder == tmp_path
    assert known is cache if ranks == (0, 1) else known.axis.ranks == ranks


def test_what_only_some_ranks_know_is_not_known(tmp_path: Path) -> None:
    def run(transport: Any) -> list[Any]:
        axis, folder = Axis("image", transport.rank, 2, (0, 1)), tmp_path / str(transport.rank)
        cache = agreed(VerificationCache(folder), (Communicator(transport), axis))
        assert cache is not None
        if transport.rank == 0:
            cache.remember("one", {}, number=1)
        cache.remember("both", {}, number=2)
        return [cache.find(key, "number", int) for key in ("one", "both")]

    assert on_threads(2, run) == [[None, 2], [None, 2]]
