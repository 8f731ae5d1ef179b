"""Networks in stages give the bits of whole ones, and a rank holds the weights of its own blocks only."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel, WorkerError
from patchpar.plan.mesh import Mesh
from patchpar.shard.stages import block_seconds
from patchpar.shard.stages.balance import balanced, balanced_by_time
from patchpar.shard.stages.block_seconds import seconds_of_blocks
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.stage_pass import StagePass
from tests.breadth import first_of
from tests.clock import Clock
from tests.exact import denoisers
from tests.tensors import noise
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.threads import on_threads
from tests.versions import needs_class
from tests.weights import networks

ON_RANKS = "tests.stages.on_ranks"
IN_EVERY_RUN = ("FluxTransformer2DModel", "HunyuanDiT2DModel")


REFUSED = {
    "DiTTransformer2DModel": "differs from the plain one by inf",  # its code reads weights of its first block
    "WanAnimate2Transformer3DModel": "writes to a cache among its arguments",
}
NETWORKS = [name for name in (*TRANSFORMERS, *denoisers.KINDS) if name not in REFUSED]


@pytest.mark.breadth
@pytest.mark.parametrize("name", REFUSED)
def test_networks_of_diffusers_that_are_refused(ranks: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkerError, match=REFUSED[name]):
        ranks.run(f"{ON_RANKS}:diffusers_network", 2, name, str(tmp_path))


def test_weights_come_back_when_there_is_room_and_not_before(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:restored_late", 2):
        assert found["equal"] == [True] * 3, "the last one after the refusal"
        assert found["restored"], "after a gather that failed"


@needs_class("Kandinsky6SRTransformer3DModel")
def test_work_is_counted_where_flex_attention_runs(ranks: Any, tmp_path: Path) -> None:
    """And leaves nothing behind that breaks its next call, as counters of all operations do."""
    for found in ranks.run(f"{ON_RANKS}:counted", 1, "Kandinsky6SRTransformer3DModel"):
        assert all(found["costs"])
        assert found["equal"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", first_of(NETWORKS, *IN_EVERY_RUN))
def test_networks_of_diffusers(ranks: Any, tmp_path: Path, name: str, world: int) -> None:
    found = ranks.run(f"{ON_RANKS}:diffusers_network", world, name, str(tmp_path))
    for rank, each in enumerate(found):
        assert each["equal"] == [True] * 3
        assert each["restored"]
        assert each["error"] == 0.0
        assert not each["equal without exchange"]
        assert each["held"] < 1
        is_last = rank == world - 1
        prediction = {"prediction": each["output"] * (world - 1)} if is_last else {}
        stage = {} if is_last else {"stage": each["handed over"][rank]}
        assert all(sent == {**stage, **prediction} for sent in each["bytes"])
    assert sum(each["held"] for each in found) < world


def test_another_form_of_call(ranks: Any) -> None:
    for found in ranks.run(f"{ON_RANKS}:two_forms", 2):
        assert found == [True] * 5


LENGTHS = [
    ("Lumina2Transformer2DModel", 2, True),
    ("Lumina2Transformer2DModel", 3, True),
    ("Lumina2Transformer2DModel", 2, False),
    ("Lumina2Transformer2DModel", 4, False),
    ("HunyuanVideoFramepackTransformer3DModel", 2, True),
    ("HunyuanVideoFramepackTransformer3DModel", 2, False),
]
"""Network, stages, and whether it has many blocks; with few of them refiners of all tokens are among the divided."""


@pytest.mark.parametrize(("name", "world", "deep"), first_of(LENGTHS, LENGTHS[0], *LENGTHS[-2:]))
def test_texts_of_other_lengths_in_arguments_of_the_same_shapes(
    ranks: Any, tmp_path: Path, name: str, world: int, deep: bool
) -> None:
    """Blocks get as many tokens as a mask says: each number of them is a form of calls, with the cuts of the first."""
    for found in ranks.run(f"{ON_RANKS}:other_lengths", world, name, str(tmp_path), deep):
        assert found["equal"] == [True] * 16
        assert not any(found["equal without exchange"])
        assert found["held"] < 1
        assert found["error"] == 0.0


@pytest.mark.parametrize("name", ["several times", "tied", "nested", "read outside", "recurrent"])
def test_networks_that_are_hard_to_divide(ranks: Any, tmp_path: Path, name: str) -> None:
    for found in ranks.run(f"{ON_RANKS}:odd_networks", 2, name, str(tmp_path)):
        assert found["restored"]
        if name in ("read outside", "nested"):
            assert "differs from the plain one by inf" in found["message"]
        else:
            assert found["equal"] == [True] * 3


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (
            "too many stages",
            "PlanError: plan stage=3, but Chain runs 2 blocks one after the other: use stage=2 at most",
        ),
        ("compiled", "UnsupportedModel: Chain has compiled modules (blocks.0)"),
        ("no blocks", "UnsupportedModel: Chain has no list of blocks"),
        ("an object", "UnsupportedModel: blocks.1 of Chain returns a tuple with more than tensors"),
        ("a step cache", "UnsupportedModel: FirstBlockCacheConfig skips blocks, or parts of them, by what it has kept"),
        ("state in arguments", "UnsupportedModel: KeepsState writes to a cache among its arguments"),
        ("a cache of tensors", "UnsupportedModel: FillsACache writes to a cache among its arguments"),
    ],
)
def test_what_cannot_run_in_stages_is_refused_on_every_rank(ranks: Any, case: str, says: str) -> None:
    for message in ranks.run(f"{ON_RANKS}:refused", 3, case):
        assert says in message


@pytest.mark.parametrize(
    ("order", "says"), [((4, 3, 2, 1, 0), "calls blocks.4 as block 0"), ((0, 1, 2, 3), "calls 4 blocks")]
)
def test_other_blocks_than_at_the_first_call_are_refused(ranks: Any, order: tuple[int, ...], says: str) -> None:
    for message in ranks.run(f"{ON_RANKS}:another_order", 2, order):
        assert f"{says}, other than at the first call" in message


def test_other_blocks_for_tensors_of_other_shapes_are_refused(ranks: Any) -> None:
    """For which a division of their own would be found, if they were the same blocks."""
    for message in ranks.run(f"{ON_RANKS}:another_order", 2, (0, 1, 2, 4, 3), 1):
        assert message.startswith("Otherwise runs other blocks, or reads more of them, where its arguments have")
        assert message.endswith("use stage=1, and patch")


def test_a_call_of_a_stage_ends_when_all_is_sent() -> None:
    """Else what it has sent would be overwritten in the next one, and what has failed would be told there."""
    sent: list[Mock] = []

    def send(*args: Any) -> Mock:
        sent.append(Mock())
        return sent[-1]

    axis = SimpleNamespace(rank=1, ranks=(0, 1, 2), after=None)
    stage = StagePass((SimpleNamespace(send=send), axis), [Mock()], Mock(), alone=False)  # type: ignore[arg-type]
    to_next = Mock()
    stage.sent.append(to_next)
    stage.finish("output")
    for each in (to_next, *sent):
        each.wait.assert_called_once()
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("slow", "only_on", "cuts"), [(None, None, (2,)), (0, None, (1,)), (4, None, (4,)), (4, 1, (2,))]
)
def test_a_slow_block_moves_the_cut(ranks: Any, slow: int | None, only_on: int | None, cuts: tuple[int, ...]) -> None:
    """By measured seconds, which all ranks agree on: what one rank alone waits for is not the block's."""
    for found in ranks.run(f"{ON_RANKS}:with_a_slow_block", 2, slow, only_on):
        assert found == {"equal": [True] * 2, "cuts": cuts}


def test_ranks_agree_on_the_seconds_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each block, and of two passes, those of the rank on which it sleeps least."""
    clock = Clock()
    monkeypatch.setattr(block_seconds, "time", clock)

    def on_rank(transport: Any) -> list[float]:
        passes = iter((1.0, 0.5))

        def plain(on_call: Any) -> None:
            of_pass = next(passes)
            for number in range(3):
                seconds = of_pass * (1 + number + (number + transport.rank) % 3)
                on_call(number, f"blocks.{number}", partial(clock.sleep, seconds))

        mesh = (Communicator(transport), Mesh(transport.rank, range(3), stage=3)["stage"])
        return seconds_of_blocks(plain, mesh)

    assert on_threads(3, on_rank, deadline=30.0) == [[0.5, 1.0, 1.5]] * 3


def test_placeholders_are_of_one_image() -> None:
    """A server makes images of many sizes: each placeholder is as large as what a block returns."""

    def samples(transport: Any) -> list[list[int]]:
        network = networks.build("several times")
        mesh = (Communicator(transport), Mesh(transport.rank, range(2), stage=2)["stage"])
        stages, found = StagedDenoiser(network, mesh, None), list[list[int]]()
        for count in (2, 3):
            stages.reset()
            for _ in range(2):
                stages.denoise(network.forward, noise(count, networks.WIDTH))
            found.append([form.shape[0] for form in stages._placeholders._tensors])
        stages.restore()
        return [*found, [form.shape[0] for form in stages._placeholders._tensors]]

    assert on_threads(2, samples, deadline=30.0) == [[[2], [3], []]] * 2


def test_ranks_that_run_different_numbers_of_blocks_are_refused() -> None:
    def on_rank(transport: Any) -> list[float]:
        def plain(on_call: Any) -> None:
            for number in range(2 + transport.rank):
                on_call(number, f"blocks.{number}", lambda: None)

        return seconds_of_blocks(plain, (Communicator(transport), Mesh(transport.rank, range(2), stage=2)["stage"]))

    for error in on_threads(2, on_rank, deadline=30.0):
        assert isinstance(error, UnsupportedModel)
        assert "different numbers of blocks" in str(error)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ([0.01, 0.01, 0.01, 0.01], (2,)),
        ([0.04, 0.01, 0.01, 0.01], (1,)),
        ([0.0004, 0.0001, 0.0001, 0.0001], (2,)),  # less than a millisecond is noise
        ([0.1, 0.1, 0.1, 0.105, 0.105], (2,)),  # and a few percent are, though a cut at 3 would be faster
        ([], (2,)),
    ],
)
def test_cuts_by_seconds_where_they_are_clearly_better(seconds: list[float], wanted: tuple[int, ...]) -> None:
    costs = [1.0] * (len(seconds) or 4)
    assert balanced_by_time(costs, seconds, range(1, len(costs)), 2) == wanted


@pytest.mark.parametrize(
    ("costs", "cuts", "stages", "wanted"),
    [
        ([1, 1, 1, 1], range(1, 4), 2, (2,)),
        ([5, 1, 1, 1], range(1, 4), 2, (1,)),
        ([1, 1, 1, 1, 4], range(1, 5), 3, (2, 4)),
        ([1, 1, 1, 1], [1], 2, (1,)),
        ([1, 1, 1, 1], [1], 3, None),
        ([1, 1], range(1, 2), 1, ()),
        ([1, 1], range(1, 2), 3, None),
    ],
)
def test_the_busiest_stage_has_the_least_work(
    costs: list[float], cuts: Any, stages: int, wanted: tuple[int, ...] | None
) -> None:
    assert balanced(costs, cuts, stages) == wanted
