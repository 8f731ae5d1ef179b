"""Every exact mode of sequence-parallel attention is attention over the whole, on ranks as threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Arrived, FlatParts
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.attention_mode import ALGORITHMS, AttentionMode
from patchpar.plan.mesh import Axis
from patchpar.shard.attention import ring
from patchpar.shard.attention.dispatch import MODES, attend_together, on_link_of
from patchpar.shard.attention.head_exchange import split_heads
from patchpar.shard.attention.sharded_qkv import ShardedQKV
from tests.unit.threads import on_threads

WIDTH, BATCH = 16, 2
TOLERANCE = 2e-5


def whole(*, heads: int, key_heads: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, count, tokens, WIDTH) for count in (heads, key_heads, key_heads)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def cut(x: Tensor, common: int, sizes: tuple[int, ...], group_rank: int) -> Tensor:
    start = common + [0, *accumulate(sizes)][group_rank]
    return torch.cat([x[:, :, :common], x[:, :, start : start + sizes[group_rank]]], 2)


def run(transport: Any, mode: AttentionMode, tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    sizes, common, group_rank = options["sizes"], options.get("common", 0), transport.rank
    comm = Communicator(transport)
    axis = Axis("patch", group_rank, len(sizes), tuple(range(len(sizes))))
    asking = common if options.get("common_asks", True) else 0
    q, k, v = (cut(x, here, sizes, group_rank) for x, here in zip(tensors, (asking, common, common), strict=True))
    shared = ShardedQKV(q_BNlD=q, k_BMlD=k, v_BMlD=v, group_rank=group_rank, **options)
    found = attend_together(mode, comm, axis, "layer", shared)
    return found, dict(comm.traffic.bytes_sent), dict(comm.traffic.rounds)


def attended(mode: AttentionMode, tensors: tuple[Tensor, ...], **options: Any) -> list[Any]:
    found = on_threads(len(options["sizes"]), run, mode, tensors, options)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def wanted(tensors: tuple[Tensor, ...], mask: Tensor | None, *, scale: float | None) -> Tensor:
    return scaled_dot_product_attention(
        *tensors, attn_mask=mask, scale=scale, enable_gqa=tensors[0].shape[1] != tensors[1].shape[1]
    )


def check(mode: AttentionMode, tensors: tuple[Tensor, ...], **options: Any) -> None:
    common, sizes = options.get("common", 0), options["sizes"]
    want = wanted(tensors, options.get("mask"), scale=options.get("scale"))
    asking = common if options.get("common_asks", True) else 0
    for group_rank, (got, _, _) in enumerate(attended(mode, tensors, **options)):
        assert (got - cut(want, asking, sizes, group_rank)).abs().max() <= TOLERANCE


AT_ONCE, IN_PARTS = (AttentionMode(overlap=overlap) for overlap in (False, True))
ALL = [AT_ONCE, IN_PARTS, *(AttentionMode(algorithm=name) for name in MODES if name != "gather")]
HYBRIDS = [replace(mode, ulysses=2) for mode in ALL]


def title(mode: AttentionMode) -> str:
    return f"{mode.algorithm}-{mode.ulysses}" + "-in-parts" * bool(mode.overlap)


@pytest.mark.parametrize("mode", [*ALL, AttentionMode(ulysses=3)], ids=title)
@pytest.mark.parametrize("common", [0, 5])
@pytest.mark.parametrize("sizes", [(7, 9, 4), (6, 6, 6)])
def test_three_ranks(mode: AttentionMode, sizes: tuple[int, ...], common: int) -> None:
    tensors = whole(heads=4, key_heads=4, tokens=common + sum(sizes))
    check(mode, tensors, sizes=sizes, common=common)


@pytest.mark.parametrize("mode", [*ALL, AttentionMode(ulysses=2)], ids=title)
@pytest.mark.parametrize("scale", [None, 0.4])
def test_two_ranks(mode: AttentionMode, scale: float | None) -> None:
    check(mode, whole(heads=3, key_heads=3, tokens=21), sizes=(11, 7), common=3, scale=scale)


@pytest.mark.parametrize("mode", [*ALL, *HYBRIDS, AttentionMode(ulysses=4)], ids=title)
def test_four_ranks_and_odd_heads(mode: AttentionMode) -> None:
    check(mode, whole(heads=5, key_heads=5, tokens=4 + 26), sizes=(7, 9, 4, 6), common=4)


@pytest.mark.parametrize("mode", [*ALL, AttentionMode(ulysses=5)], ids=title)
def test_five_ranks(mode: AttentionMode) -> None:
    check(mode, whole(heads=6, key_heads=6, tokens=2 + 15), sizes=(3, 4, 1, 5, 2), common=2)


@pytest.mark.parametrize("mode", [*ALL, *HYBRIDS, AttentionMode(ulysses=4)], ids=title)
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (8, 4), (6, 3), (4, 1)])
def test_grouped_heads(mode: AttentionMode, heads: int, key_heads: int) -> None:
    check(mode, whole(heads=heads, key_heads=key_heads, tokens=3 + 17), sizes=(5, 4, 2, 6), common=3)


@pytest.mark.parametrize("mode", [*ALL, *HYBRIDS, AttentionMode(ulysses=4)], ids=title)
@pytest.mark.parametrize("masked", [False, True])
def test_common_tokens_that_do_not_ask(mode: AttentionMode, masked: bool) -> None:
    """Text that is seen, but sees nothing: PRX, and the image of an IP-Adapter."""
    q, k, v = whole(heads=5, key_heads=5, tokens=3 + 17)
    mask = torch.rand(BATCH, 1, 17, 3 + 17, generator=torch.Generator().manual_seed(1)) < 0.6 if masked else None
    check(mode, (q[:, :, 3:], k, v), sizes=(5, 4, 2, 6), common=3, common_asks=False, mask=mask)


def masks(kind: str, heads: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "padding":
        return torch.arange(tokens)[None, None, None, :] < torch.tensor([tokens, tokens - 4])[:, None, None, None]
    if kind == "first-places-only":  # to some places nobody attends at all
        return (torch.arange(tokens) < 6)[None, None, None, :]
    if kind == "bias-of-heads":  # the same for all samples, without a dim for them
        return torch.randn(heads, tokens, tokens, generator=generator)
    if kind == "pairs":
        return torch.rand(BATCH, 1, tokens, tokens, generator=generator) < 0.6
    return torch.randn(BATCH, heads, tokens, tokens, generator=generator)


@pytest.mark.parametrize("mode", [*ALL, *HYBRIDS, AttentionMode(ulysses=4)], ids=title)
@pytest.mark.parametrize("kind", ["padding", "first-places-only", "pairs", "bias", "bias-of-heads"])
def test_masks(mode: AttentionMode, kind: str) -> None:
    mask = masks(kind, 4, 3 + 17)
    check(mode, whole(heads=4, key_heads=4, tokens=3 + 17), sizes=(5, 4, 2, 6), common=3, mask=mask)


@pytest.mark.parametrize("mode", [*ALL, *HYBRIDS], ids=title)
def test_half_precision_is_no_worse_than_rounding(mode: AttentionMode) -> None:
    tensors = whole(heads=4, key_heads=4, tokens=40, dtype=torch.bfloat16)
    sizes = (12, 10, 8, 10)
    exact = wanted(tuple(x.double() for x in tensors), None, scale=None)
    plain = wanted(tensors, None, scale=None)
    for group_rank, (got, _, _) in enumerate(attended(mode, tensors, sizes=sizes)):
        ours, torchs = (
            (x.double() - cut(exact, 0, sizes, group_rank)).norm() for x in (got, cut(plain, 0, sizes, group_rank))
        )
        assert got.dtype == torch.bfloat16
        assert ours <= 2 * torchs


@pytest.mark.parametrize("mode", [*ALL, *HYBRIDS], ids=title)
def test_without_the_others_it_is_wrong(mode: AttentionMode) -> None:
    """The negative control: what others have is another thing, and the result must show it."""
    sizes, tensors = (5, 4, 2, 6), whole(heads=4, key_heads=4, tokens=17)
    other = tuple(torch.cat([x[:, :, :5], x[:, :, 5:].flip(2) * 2], 2) for x in tensors)
    before, after = (attended(mode, each, sizes=sizes)[0][0] for each in (tensors, other))
    assert (before - after).abs().max() > 1e-2


ROW = 4 * BATCH * WIDTH  # bytes of one token and head in fp32


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes(ranks: int) -> None:
    """The closed formulas, in units of a token's heads: S tokens, N heads."""
    heads, tokens = 12, 12
    sizes, unit = (tokens // ranks,) * ranks, 12 * ROW
    tensors = whole(heads=heads, key_heads=heads, tokens=tokens)
    ring = 2 * (ranks - 1) * tokens * unit // ranks

    def sent(mode: AttentionMode) -> list[dict[str, int]]:
        return [counted for _, counted, _ in attended(mode, tensors, sizes=sizes)]

    for mode in (AT_ONCE, IN_PARTS, AttentionMode(algorithm="ring"), AttentionMode(algorithm="two-way-ring")):
        assert sent(mode) == [{"kv": ring}] * ranks
    lse = (ranks - 1) * tokens // ranks * heads * BATCH * 4
    for counted in sent(AttentionMode(algorithm="token-ring")):
        assert counted == {"q": ring // 2, "partials": ring // 2 + lse}
    ulysses = 4 * (ranks - 1) * tokens * unit // ranks**2
    assert sent(AttentionMode(ulysses=ranks)) == [{"heads": ulysses}] * ranks
    if ranks == 4:
        hybrid = sent(AttentionMode(algorithm="ring", ulysses=2))
        # USP: (4 (U - 1) / U + 2 (R - 1)) / N of the sequence, of which the ring's part is for 1/U of the heads
        assert hybrid == [{"heads": 4 * tokens * unit // 2 // 4, "kv": 2 * tokens * unit // 4}] * ranks


def test_rounds() -> None:
    tensors = whole(heads=4, key_heads=4, tokens=20)
    rounds = {title(mode): attended(mode, tensors, sizes=(5,) * 4)[0][2] for mode in (*ALL, AttentionMode(ulysses=4))}
    assert rounds == {
        "gather-1": {"kv": 1},
        "gather-1-in-parts": {"kv": 1},
        "ring-1": {"kv": 3},
        "two-way-ring-1": {"kv": 2},
        "token-ring-1": {"q": 2, "q+partials": 2, "partials": 1},
        "gather-4": {"heads": 2},
    }


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ("ring", ["send", "own", "send", "other", "send", "other", "other"]),
        ("two-way-ring", ["send", "own", "send", "other", "other", "other"]),
    ],
)
def test_the_next_round_is_sent_before_this_one_is_attended_to(
    monkeypatch: pytest.MonkeyPatch, algorithm: Any, wanted: list[str]
) -> None:
    order: dict[int, list[str]] = defaultdict(list)

    def noted(what: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            order[threading.get_ident()].append(what)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(Communicator, "send_recv", noted("send", Communicator.send_recv))
    for name, what in (("attend_own", "own"), ("attend_others", "other")):
        monkeypatch.setattr(ring, name, noted(what, getattr(ring, name)))
    attended(AttentionMode(algorithm=algorithm), whole(heads=2, key_heads=2, tokens=8), sizes=(2,) * 4)
    assert list(order.values()) == [wanted] * 4


def test_fewer_heads_than_ranks() -> None:
    with pytest.raises(UnsupportedModel, match="2 attention heads cannot be shared by 3 ranks: use ulysses=2 or less"):
        attended(AttentionMode(ulysses=3), whole(heads=2, key_heads=2, tokens=9), sizes=(3, 3, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "rings"}, "attention='rings': use gather, ring, two-way-ring, token-ring"),
        ({"ulysses": 0}, "ulysses=0: it is a number of ranks, at least 1"),
        ({"ulysses": True}, "ulysses=True"),
        ({"overlap": "yes"}, "overlap='yes': use True, False or None"),
        ({"algorithm": "ring", "overlap": False}, "overlap=False is for attention=gather: ring always overlaps"),
    ],
)
def test_modes_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        AttentionMode(**options)


@pytest.mark.parametrize("collectives", [None, object()], ids=["messages", "collectives"])
def test_keys_are_attended_to_at_once_where_they_arrive_together(collectives: object) -> None:
    transport: Any = SimpleNamespace(collectives=collectives)
    assert on_link_of(transport, AttentionMode()).overlap is (collectives is None)
    for decided in (AT_ONCE, IN_PARTS, AttentionMode(algorithm="ring")):
        assert on_link_of(transport, decided) is decided


class Launches(TorchDispatchMode):
    """Names of the kernels that would be launched on a GPU: all but views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class InPlace:
    """Stands for a communicator with one operation for all ranks; what is gathered is in its place already."""

    def __init__(self) -> None:
        self.transport = SimpleNamespace(collectives=self)

    def all_gather(self, axis: Axis, kind: str, where: str, own: Tensor, *, into: Tensor) -> Arrived[Tensor]:
        found = into.view(axis.size, *own.shape)
        assert found[axis.rank].data_ptr() == own.data_ptr()
        return Arrived(into, where)

    def all_to_all(
        self, axis: Axis, kind: str, where: str, own: FlatParts, into: FlatParts, layout: Any = None
    ) -> Arrived[Tensor]:
        assert own.sizes == into.sizes  # of equal shares
        return Arrived(into.buffer.copy_(own.buffer), where)


@pytest.mark.parametrize(
    ("mode", "common", "before", "after"),
    [
        (AttentionMode(), 0, ["cat"], []),
        (AttentionMode(), 3, ["cat", "cat"], []),
        (AttentionMode(ulysses=3), 0, ["cat", "copy_"], ["copy_", "cat"]),
        (AttentionMode(ulysses=3), 3, ["cat", "cat", "copy_"], ["cat", "copy_", "cat"]),
    ],
    ids=str,
)
def test_launches_beside_one_attention(mode: AttentionMode, common: int, before: list[str], after: list[str]) -> None:
    """One to pack what is sent, one for text, and with heads one to join those that return; `copy_` is the exchange."""
    comm: Any = InPlace()
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in whole(heads=6, key_heads=6, tokens=common + 6))
    shared = ShardedQKV(q_BNlD=q, k_BMlD=k, v_BMlD=v, sizes=(6, 6, 6), group_rank=1, common=common)
    with Launches() as launches:
        attend_together(mode, comm, Axis("patch", 1, 3, (0, 1, 2)), "layer", shared)
    assert launches.names == [*before, "_scaled_dot_product_flash_attention_for_cpu", *after]


def test_a_degree_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match="ulysses=4 does not divide 6 ranks into groups: use 1, 2, 3, 6"):
        AttentionMode(ulysses=4).check_group_size(6)


@pytest.mark.parametrize(("heads", "key_heads", "ranks"), [(24, 24, 5), (7, 7, 3), (12, 4, 3), (12, 2, 4), (6, 2, 6)])
def test_heads_are_split_evenly(heads: int, key_heads: int, ranks: int) -> None:
    split = split_heads(heads, key_heads, ranks)
    counts = [len(each.query) for each in split]
    assert sum(counts) == heads
    assert max(counts) - min(counts) <= heads // key_heads
    group = heads // key_heads
    for each in split:
        needed = {head // group for head in range(*each.query)}
        assert needed == set(range(*each.key))


def test_tokens_that_are_not_there() -> None:
    q, k, v = (x[:, :, :4] for x in whole(heads=2, key_heads=2, tokens=9))
    with pytest.raises(UnsupportedModel, match="group rank 0 has 0 common and 5 own tokens"):
        ShardedQKV(q_BNlD=q, k_BMlD=k, v_BMlD=v, sizes=(5, 4), group_rank=0)
    q, k, v = whole(heads=2, key_heads=2, tokens=9)
    with pytest.raises(UnsupportedModel, match=r"keys are \(2, 2, 9, 16\) and values \(2, 2, 9, 8\)"):
        ShardedQKV(q_BNlD=q, k_BMlD=k, v_BMlD=v[..., :8], sizes=(9,), group_rank=0)
    q, k, v = whole(heads=3, key_heads=2, tokens=9)
    with pytest.raises(UnsupportedModel, match="3 query heads cannot share 2 key heads"):
        ShardedQKV(q_BNlD=q, k_BMlD=k, v_BMlD=v, sizes=(9,), group_rank=0)


def test_every_way_has_a_mode() -> None:
    assert list(ALGORITHMS) == list(MODES)
