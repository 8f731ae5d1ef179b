"""Networks of other libraries, split between threads or processes, give what they give in one piece."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar import LaunchError, PlanError, Team, UnsupportedModel, shard_module
from patchpar.pipeline.known_denoisers import KnownDenoisers
from patchpar.pipeline.module.team import replicate
from patchpar.shard.unet.discover import discover
from patchpar.shard.verification import fingerprint_of
from tests.breadth import first_of
from tests.modules.networks import NETWORKS, call_of, network
from tests.tensors import relative
from tests.test_readme import BLOCK, REPOSITORY

LIMIT, CONTROL = 7e-7, 1e-2
MOVING = 0.3
"""Limit of the error of stale edges: the calls of these tests have unrelated noise in each step."""


def copies(name: str, count: int = 2) -> list[nn.Module]:
    return [network(name) for _ in range(count)]


@pytest.mark.parametrize(("name", "size"), first_of(product(NETWORKS, (2, 3)), ("flux", 3)))
def test_threads_give_what_one_gives(name: str, size: int, tmp_path: Path) -> None:
    plain = network(name)
    with Team(copies(name, size), patch=size, verify=tmp_path, ignore=["transformer_options"]) as team:
        errors = [relative(team(**call_of(name, step)), plain(**call_of(name, step))) for step in range(2)]
        assert max(errors) <= LIMIT, errors
        assert team.error is not None
        team.control(exchange="off")
        assert relative(team(**call_of(name)), plain(**call_of(name))) >= CONTROL
    assert torch.equal(team.replicas[1](**call_of(name)), plain(**call_of(name)))


@pytest.mark.parametrize("name", first_of(NETWORKS, "unet"))
def test_processes_give_what_one_gives(ranks: Any, name: str, tmp_path: Path) -> None:
    found = ranks.run("tests.modules.on_ranks:sharded", 4, name, str(tmp_path), through="torch")
    for errors, off, after in found:
        assert max(errors) <= LIMIT, found
        assert off >= CONTROL
        assert after == 0.0


def test_the_examples_of_the_page(ranks: Any) -> None:
    """With a card in the place of each, and processes in that of torchrun's."""
    page = (REPOSITORY / "docs/howto/any-module.md").read_text()
    team, module = (match["text"] for match in BLOCK.finditer(page) if match["language"] == "py")
    call = call_of("wan")
    names: dict[str, Any] = {"latents": call["x"], "t": call["timestep"], "text": call["context"]}
    exec(team.replace("cuda:1", "cpu"), names | {"network": network("wan")}, found := {})
    assert relative(found["noise"], network("wan")(names["latents"], names["t"], context=names["text"])) <= LIMIT
    assert (
        max(ranks.run("tests.modules.on_ranks:example", 4, module.replace("patch=2", "patch=4"), through="torch"))
        <= LIMIT
    )


@pytest.mark.parametrize("name", first_of(NETWORKS))
def test_uneven_parts_and_stale_values(name: str, tmp_path: Path) -> None:
    plain = network(name)
    with Team(copies(name), ratio=(3, 1), verify=tmp_path) as team:
        assert relative(team(**call_of(name)), plain(**call_of(name))) <= LIMIT
    with Team(copies(name), strategy="fresh-edges:warmup_steps=1", verify=tmp_path) as team:
        with pytest.raises(PlanError, match=r"call begin\(\) before each image and step\(\)"):
            team(**call_of(name))
        team.begin()
        errors = []
        for step in range(3):
            errors.append(relative(team(**call_of(name, step)), plain(**call_of(name, step))))
            team.step()
    assert errors[0] <= LIMIT
    assert LIMIT < max(errors[1:]) <= MOVING, errors


class FailsAt(nn.Module):
    """A layer that fails in the call with that number."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fails = inner, False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise MemoryError("no room on this device")
        return self.inner(x)


def test_a_copy_that_fails_ends_the_call_of_all(tmp_path: Path) -> None:
    replicas: list[Any] = copies("unet")
    for replica in replicas:
        replica.middle_block[0].emb_layers[1] = FailsAt(replica.middle_block[0].emb_layers[1])
    with Team(replicas, verify=tmp_path, deadline=600) as team:
        want = team(**call_of("unet"))
        replicas[1].middle_block[0].emb_layers[1].fails = True
        with pytest.raises(MemoryError, match="no room"):
            team(**call_of("unet"))
        replicas[1].middle_block[0].emb_layers[1].fails = False
        assert torch.equal(team(**call_of("unet")), want)


def comparisons(folder: Path) -> set[Path]:
    """The files with an error; networks that are split by tokens have their plan beside them."""
    return {file for file in folder.iterdir() if "relative_error" in file.read_text()}


@pytest.mark.parametrize("name", first_of(NETWORKS, "unet"))
def test_a_change_of_autocast_is_compared_anew(name: str, tmp_path: Path) -> None:
    """It rounds in another way, with other kernels; what was compared before stays known."""
    plain = network(name)
    with Team(copies(name), verify=tmp_path, ignore=["transformer_options"]) as team:
        team(**call_of(name))
        (exact,), error = comparisons(tmp_path), team.error
        with torch.autocast("cpu", torch.bfloat16):
            found, want = team(**call_of(name)), plain(**call_of(name))
        (other,) = comparisons(tmp_path) - {exact}
        assert "bfloat16" in other.read_text()
        assert team.error != error
        assert relative(found.float(), want.float()) <= CONTROL * 5
        assert relative(team(**call_of(name)), plain(**call_of(name))) <= LIMIT
        assert comparisons(tmp_path) == {exact, other}
        assert team.error == error


def test_threads_enter_the_streams_of_their_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of CPUs there are none: what a GPU does with them is seen in tests/gpu."""
    entered: list[tuple[str, str]] = []
    devices: list[str] = []

    def current_device(device: str) -> AbstractContextManager[None]:
        devices.append(device)
        return nullcontext()

    @contextmanager
    def in_stream(stream: str) -> Iterator[None]:
        entered.append((threading.current_thread().name.rpartition("_")[0], stream))
        yield

    with Team(copies("unet"), verify=tmp_path) as team:
        monkeypatch.setattr("patchpar.pipeline.module.team.in_stream", in_stream)
        monkeypatch.setattr("patchpar.pipeline.module.team.current_streams", lambda _: ["side"])
        monkeypatch.setattr("patchpar.pipeline.module.sharded_module.current_device", current_device)
        team.begin()
        assert devices == ["cpu"] * 2
        team(**call_of("unet"))
        assert devices == ["cpu"] * 4, "kernels and events are of the network's device, whatever the script's is"
    assert sorted(set(entered)) == [("patchpar-0", "side"), ("patchpar-1", "side")]


def test_streams_wait_for_those_of_the_call_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In which what ranks keep for the next step was computed."""

    class Stream:
        def __init__(self) -> None:
            self.waited_for: list[Stream] = []

        def wait_stream(self, other: Stream) -> None:
            self.waited_for.append(other)

    one, other, module = Stream(), Stream(), "patchpar.pipeline.module.team"
    with Team(copies("unet"), verify=tmp_path) as team:
        monkeypatch.setattr(f"{module}.in_stream", nullcontext)
        for stream in (one, one, other, one):
            monkeypatch.setattr(f"{module}.current_streams", lambda _, stream=stream: [stream])
            team.begin()
    assert (one.waited_for, other.waited_for) == ([other], [one])


class Counts(nn.Module):
    """A network that counts its calls, those of a comparison too."""

    def __init__(self, inner: nn.Module, counts: Counter[str]) -> None:
        super().__init__()
        self.inner, self.counts = inner, counts

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor, transformer_options: Any) -> Tensor:
        self.counts["calls"] += 1
        return self.inner(x, timesteps, context, y, transformer_options=transformer_options)


@pytest.mark.parametrize(("ignore", "calls"), [((), 2), (("transformer_options",), 1)])
def test_numbers_in_ignored_options_cause_no_comparison(tmp_path: Path, ignore: Any, calls: int) -> None:
    """A counter in the options is another call otherwise, which is compared with a plain one."""
    counts = [Counter[str](), Counter[str]()]
    replicas = [Counts(network("unet"), each) for each in counts]
    with Team(replicas, verify=tmp_path, ignore=ignore) as team:
        for number in range(3):
            call = call_of("unet")
            call["transformer_options"]["counter"] = number
            before = counts[0]["calls"]
            team(**call)
    assert (counts[0]["calls"] - before >= 2) == (calls == 2)
    assert calls == 2 or counts[0]["calls"] - before == 1


@pytest.mark.parametrize("name", ["unet", "flux"])
def test_numbers_in_ignored_options_are_no_other_result(name: str, tmp_path: Path) -> None:
    """Of another process: what it finds in the folder is of a call with another number."""
    kept = []
    for number in range(2):
        call = call_of(name)
        call["transformer_options"]["counter"] = number
        with Team(copies(name), verify=tmp_path, ignore=["transformer_options"]) as team:
            team(**call)
        kept.append({file.name for file in tmp_path.rglob("*.json")})
    assert kept[0] == kept[1] != set()


def test_what_cannot_be_a_team_is_refused() -> None:
    one = network("wan")
    with pytest.raises(PlanError, match=r"are one object: make another with copy\.deepcopy"):
        Team([one, one])
    with pytest.raises(PlanError, match="are a WanModel and a Flux"):
        Team([one, network("flux")])
    with pytest.raises(PlanError, match="patch=3 with 2 copies"):
        Team(copies("wan"), patch=3)
    with pytest.raises(PlanError, match="on no device, since it has no weights"):
        Team([nn.Identity(), nn.Identity()])
    for strategy in ("structure", "piped"):
        with pytest.raises(PlanError, match=r"strategy"):
            Team(copies("wan"), strategy=strategy)
    with pytest.raises(PlanError, match="are 3 numbers, and axis 'patch' has 2 ranks"):
        Team(copies("wan"), ratio=(1, 2, 3))
    with pytest.raises(LaunchError, match="deadline=0: it must be a finite number"):
        Team(copies("wan"), deadline=0)
    compiled = copies("wan")
    compiled[1].compile()
    with pytest.raises(PlanError, match=r"WanModel is compiled as a whole.*compile its blocks instead"):
        Team(compiled)
    with Team(copies("wan")) as team, pytest.raises(UnsupportedModel, match="gradients are taken through WanModel"):
        team(**{**call_of("wan"), "x": call_of("wan")["x"].requires_grad_()})
    with (
        Team(copies("wan"), strategy="displaced") as team,
        pytest.raises(PlanError, match=r"call begin\(\) before each"),
    ):
        team(**call_of("wan"))


def test_a_team_of_one_makes_plain_calls() -> None:
    with Team(copies("wan", 1)) as team:
        assert torch.equal(team(**call_of("wan")), network("wan")(**call_of("wan")))
    first, second = replicate(network("wan"), ["cpu", "cpu"])
    assert not {id(each) for each in first.modules()} & {id(each) for each in second.modules()}
    with pytest.raises(PlanError, match="the network is on cpu, and the first device is meta: move it there before"):
        replicate(first, ["meta", "cpu"])


def test_a_closed_team_says_so() -> None:
    team = Team(copies("wan"))
    team.close()
    for use in (team.begin, team.step, lambda: team(**call_of("wan"))):
        with pytest.raises(PlanError, match="this team is closed: make a new one"):
            use()
    team.close()


def test_copies_that_are_in_another_team_are_refused(tmp_path: Path) -> None:
    """Also where they are in a part of it, until that team is closed."""
    networks, call = copies("unet"), call_of("unet")
    with Team(networks, verify=tmp_path) as team:
        want = team(**call)
        for taken in (networks, [network("unet"), networks[1]]):
            with pytest.raises(PlanError, match="is split between ranks already: close that team"):
                Team(taken, verify=tmp_path)
        assert torch.equal(team(**call), want)
    with Team(networks, verify=tmp_path) as again:
        assert torch.equal(again(**call), want)


def test_without_processes_the_way_out_is_named() -> None:
    with pytest.raises(LaunchError, match=r"start this with torchrun .* or use Team"):
        shard_module(network("wan"), patch=2)


class Switched(nn.Module):
    """Runs another convolution and another norm where it is told to refine, or gets a map to add."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 4) for _ in range(2))

    def forward(self, x: Tensor, scale: float, refine: bool = False, residual: Tensor | None = None) -> Tensor:
        x = scale * self.first(F.silu(self.norms[0](x)))
        if residual is not None:
            x = x + self.third(residual)
        return self.second(self.norms[1](x)) if refine else x


@pytest.mark.parametrize("strategy", ["exact", "displaced:warmup_steps=1"])
def test_a_call_that_runs_other_layers_is_discovered_and_verified(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each kind of call once, whatever its numbers and sizes. Values are stale after a call of the same kind only."""
    found: list[Any] = []
    monkeypatch.setattr("patchpar.shard.unet.denoiser.discover", lambda *call: found.append(call) or discover(*call))
    torch.manual_seed(0)
    plain = Switched().eval().requires_grad_(False)
    x, residual = torch.randn(2, 1, 4, 16, 16)
    kinds: list[dict[str, Any]] = [{}, {"refine": True}, {"residual": residual}, {}, {"refine": True}, {"refine": True}]
    with Team([deepcopy(plain) for _ in range(2)], strategy=strategy, verify=tmp_path) as team:
        team.begin()
        for step, kind in enumerate(kinds):
            call: dict[str, Any] = {"x": x, "scale": 1 + 0.1 * step, **kind}
            error = relative(team(**call), plain(**call))
            assert (error > LIMIT) == (step == 5 and strategy != "exact"), (step, error)
            team.step()
        for size in (12, 8):
            team.begin()
            call = {"x": x[..., :size, :size], "scale": 2}
            assert relative(team(**call), plain(**call)) <= LIMIT
    assert len(found) == 2 * 3


def test_what_is_found_out_about_a_network_holds_for_another_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks that go on without a lost one do not search again; a network that has changed meanwhile is searched."""
    found: list[Any] = []
    monkeypatch.setattr("patchpar.shard.unet.denoiser.discover", lambda *call: found.append(call) or discover(*call))
    torch.manual_seed(0)
    plain = Switched().eval().requires_grad_(False)
    replicas = [deepcopy(plain) for _ in range(2)]
    known, call = [KnownDenoisers() for _ in replicas], {"x": torch.randn(1, 4, 16, 16), "scale": 2.0}

    def searched(strategy: str) -> int:
        """Make a call with a new plan, and return how many ranks have searched."""
        found.clear()
        with Team(replicas, strategy=strategy, verify=tmp_path) as team:
            denoisers = [handle.denoiser for handle in team._handles]
            for each, denoiser in zip(known, denoisers, strict=True):
                each.pass_on(denoiser, alone=True)
            team.begin()
            assert relative(team(**call), plain(**call)) <= LIMIT
            for each, denoiser in zip(known, denoisers, strict=True):
                each.keep([denoiser])
        return len(found)

    assert [searched("exact"), searched("displaced:warmup_steps=1"), searched("exact")] == [2, 0, 0]
    for each in (plain, *replicas):
        each.norms[0].eps = 0.1
    assert [searched("exact"), searched("displaced:warmup_steps=1")] == [2, 0]
    for denoisers in known:
        denoisers.forget()
    assert searched("exact") == 2


class OneLayer(nn.Module):
    """Attends to the image and to text in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.part = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), TwoCalls()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.part(self.norm(self.conv(x)), context)


class TwoCalls(nn.Module):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)[:, None]
        tokens = tokens + F.scaled_dot_product_attention(tokens, tokens, tokens)
        tokens = tokens + F.scaled_dot_product_attention(tokens, context[:, None], context[:, None])
        return tokens[:, 0].transpose(1, 2).reshape(x.shape)


def test_a_layer_with_two_kinds_of_attention_is_refused() -> None:
    layer = OneLayer()
    call = (torch.randn(1, 4, 16, 16), torch.randn(1, 5, 4))
    with pytest.raises(UnsupportedModel, match=r"part in OneLayer calls .* put each call in a module of its own"):
        discover(layer, layer.forward, call, {})


def test_networks_without_a_configuration_are_told_apart_by_their_weights() -> None:
    small, large = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3, bias=False))
    assert fingerprint_of(small)["config"] != fingerprint_of(large)["config"]


def test_values_that_are_dropped_at_random_are_refused(tmp_path: Path) -> None:
    """In train mode each copy would drop others. The control: nothing is dropped."""
    plain, replicas = network("unet"), copies("unet")
    for replica in (plain, *replicas):
        replica.add_module("last_dropout", nn.Dropout(0.0))
        replica.register_forward_hook(lambda module, _, found: module.last_dropout(found))
        replica.train()
    with Team(replicas, verify=tmp_path) as team:
        assert relative(team(**call_of("unet")), plain(**call_of("unet"))) <= LIMIT
        for replica in replicas:
            replica.last_dropout.p = 0.5
        with pytest.raises(
            PlanError, match=r"train mode, in which last_dropout drops values at random.* eval\(\) first"
        ):
            team(**call_of("unet"))
        for replica in replicas:
            replica.eval()
        assert relative(team(**call_of("unet")), plain(**call_of("unet"))) <= LIMIT
