"""In which grid tokens lie, and how it is shared."""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.transformer.attention import TokenSplit, attend_split, cut_for
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.probe.grid import grid_of_table
from patchpar.shard.transformer.split_tokens import CallRuns
from patchpar.shard.transformer.token_plan import AttentionTokens, GridSource, TokenPlan, TokenRows
from patchpar.shard.transformer.token_ranges import Cut, TokenGrid, TokenRanges, spread
from patchpar.strategies import parse_strategy
from tests.breadth import first_of
from tests.tiny.transformers_entry import IMAGE, VIDEO
from tests.unit.threads import on_threads

from .ranks import LIMIT, TRANSFORMERS, error, plain, plan_of, predictions

plan_for = cache(plan_of)
IMAGE_GRID = "rows x columns = dims -2, -1 of the latent, 2 x 2 to a token"
CLIP = "frames x rows x columns = dims -3, -2, -1 of the latent, 1 x 2 x 2 to a token"
TABLE = "the grid of image_rotary_emb[0]"
ORIGINS = {
    "SD3Transformer2DModel": IMAGE_GRID,
    "PixArtTransformer2DModel": IMAGE_GRID,
    "WanTransformer3DModel": CLIP,
    "HunyuanVideoTransformer3DModel": CLIP,
    "CogVideoXTransformer3DModel": "frames x rows x columns = dims -4, -2, -1 of the latent, 1 x 2 x 2 to a token",
    "FluxTransformer2DModel": TABLE,
    "QwenImageTransformer2DModel": TABLE,
    "LTXVideoTransformer3DModel": TABLE,
}


def size_of(name: str, variant: int) -> TokenGrid:
    """What the calls of that size are drawn with."""
    return TokenGrid(*VIDEO[variant]) if "Video" in name or "3D" in name else TokenGrid(1, *IMAGE[variant])


def split(name: str, plan: TokenPlan, ranks: int, variant: int, way: TokenSplit | None = None, **options) -> list:
    """Predictions on every rank, and how the tokens were shared."""
    tiny = TRANSFORMERS[name]
    models = [tiny.build() for _ in range(ranks)]

    def on_rank(transport):
        axis = Axis("patch", transport.rank, ranks, tuple(range(ranks)))
        shard = TransformerSharder(models[transport.rank], plan, TokenSplit(Communicator(transport), axis, **options))
        with torch.no_grad():
            return predictions(shard.denoise(models[transport.rank].forward, **tiny.call(variant))), shard.ranges

    found = on_threads(ranks, on_rank, deadline=30.0)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


@pytest.mark.parametrize("name", first_of(ORIGINS, *list(ORIGINS)[::4]))
def test_where_tokens_come_from(name: str) -> None:
    """Found at one size, and true of the other."""
    plan = plan_for(name)
    assert {str(block.origin) for block in plan.blocks if "refiner" not in block.name} == {ORIGINS[name]}
    for variant in (0, 1):
        ((got, token_ranges),) = split(name, plan, 1, variant, mode=None, cut="rows")
        assert {each.grid for list_name, each in token_ranges.items() if "refiner" not in list_name} == {
            size_of(name, variant)
        }
        assert error([got], plain(name, variant)) == 0


@pytest.mark.parametrize("name", ["StableAudioDiTModel", "AceStepTransformer1DModel"])
def test_sequences_have_no_grid(name: str) -> None:
    assert {block.origin for block in plan_for(name).blocks} == {None}
    assert "tokens lie in                    a row" in str(plan_for(name))


def test_blocks_beyond_the_first_are_not_run_for_it() -> None:
    """Twice for the whole search, which is how often the model is run in full."""
    tiny = TRANSFORMERS["WanTransformer3DModel"]
    model, runs = tiny.build(), []
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    counting = [block.attn1.to_q.register_forward_hook(lambda *_: runs.append(1)) for block in model.blocks[1:]]
    discover_tokens(model, model.forward, (), tiny.call(0))
    assert len(runs) == 2 * len(counting) > 0
    assert {path: module.__dict__.keys() for path, module in model.named_modules()} == {
        path: known.keys() for path, known in before.items()
    }


class Embedded(nn.Module):
    """Patches of an image, put in another order by `order`."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.blocks = order, nn.ModuleList([Attending()])

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = nn.functional.pixel_unshuffle(hidden_states, 2)
        if self.order == "columns first":
            x = x.transpose(2, 3)
        x = x.flatten(2).transpose(1, 2)
        if self.order == "shuffled":
            x = x[:, torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))]
        if self.order == "two swapped":
            x = x[:, [0, 2, 1, *range(3, x.shape[1])]]
        if self.order == "blurred":
            x = x + x.mean((1, 2), keepdim=True)
        return self.blocks[0](x)


class Attending(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unsqueeze(1)
        return x + nn.functional.scaled_dot_product_attention(q, q, q).squeeze(1)


@pytest.mark.parametrize("order", ["rows first", "columns first", "shuffled", "two swapped", "blurred"])
def test_what_is_not_in_the_order_of_rows_is_a_row(order: str) -> None:
    model = Embedded(order)
    call = (torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0)),)
    (block,) = discover_tokens(model, model.forward, call, {}).blocks
    known = GridSource(dims=(-2, -1), patches=(2, 2))
    assert block.origin == (known if order == "rows first" else None)


def test_no_grid_where_cells_would_be_cut() -> None:
    origin = GridSource(dims=(-3, -2, -1), patches=(1, 2, 2))
    assert origin.grid((16, 3, 8, 10)) == TokenGrid(3, 4, 5)
    assert origin.grid((16, 3, 8, 9)) is None
    assert origin.grid((64, 16)) is None


def table(*axes: int, repeat: int = 1) -> Tensor:
    """Cosines and sines [S, 8 for each axis] of the places of a grid."""
    num_ranks = torch.cartesian_prod(*(torch.arange(size) for size in axes)).view(math.prod(axes), -1).float()
    turned = (num_ranks[:, :, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])).flatten(1).repeat(repeat, 1)
    return torch.cat([turned.cos(), turned.sin()], 1)


def test_grids_of_tables() -> None:
    assert grid_of_table(table(8, 6), 0) == TokenGrid(1, 8, 6)
    assert grid_of_table(table(6, 8), 0) == TokenGrid(1, 6, 8)
    assert grid_of_table(table(3, 4, 5), 0) == TokenGrid(3, 4, 5)
    assert grid_of_table(table(3, 4, 5).T[None], 2) == TokenGrid(3, 4, 5)
    assert grid_of_table(torch.polar(torch.ones(48, 2), table(8, 6)[:, ::4].contiguous()[:, :2]), 0) is not None
    assert grid_of_table(table(8, 6).bfloat16(), 0) == TokenGrid(1, 8, 6)


@pytest.mark.parametrize(
    "x",
    [
        table(48),
        table(7),
        torch.cat([table(4, 6), table(8, 3)]),  # two images
        torch.cat([table(4, 6), table(4, 6)[5:]]),
        table(8, 6)[torch.randperm(48, generator=torch.Generator().manual_seed(0))],
        table(8, 6) + table(48)[:, :1],
        table(2, 3, 4, 2),
        torch.ones(48, 8),
        torch.arange(48),
        torch.ones(48, 0),
    ],
    ids=[
        "a line",
        "seven",
        "two pictures",
        "a part",
        "shuffled",
        "features of both",
        "four axes",
        "one value",
        "numbers",
        "nothing",
    ],
)
def test_tables_without_a_grid(x: Tensor) -> None:
    assert grid_of_table(x, 0) is None


CLIPS = [(TokenGrid(2, 4, 6), "rows"), (TokenGrid(2, 4, 6), "bands"), (TokenGrid(5, 3, 2), "rows"), (None, "rows")]


@pytest.mark.parametrize(("grid", "cut"), CLIPS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_tokens_are_shared_and_joined(grid: TokenGrid | None, cut: Cut, num_ranks: int) -> None:
    tokens = 48 if grid is None else grid.num_tokens
    x = torch.arange(tokens).view(1, tokens, 1)
    token_ranges = [spread(tokens, group_rank, num_ranks, grid=grid, cut=cut) for group_rank in range(num_ranks)]
    parts = [each.own(x, 1) for each in token_ranges]
    assert [part.shape[1] for part in parts] == list(token_ranges[0].sizes)
    assert torch.equal(token_ranges[0].joined(parts, 1), x)
    assert all(torch.equal(*each) for each in zip(token_ranges[0].parts(x, -2), parts, strict=True))
    for number in range(tokens + 1):
        assert [each.before(number) for each in token_ranges] == [int((part < number).sum()) for part in parts]
    most = token_ranges[0].across.num_tokens  # of one row
    assert max(token_ranges[0].sizes) - min(token_ranges[0].sizes) <= most


def test_bands_go_along_the_longer() -> None:
    numbers = torch.arange(48).view(2, 4, 6)
    rows = spread(48, 1, 2, grid=TokenGrid(2, 4, 6), cut="rows")
    assert rows.own(torch.arange(48), 0).tolist() == numbers[:, 2:].flatten().tolist()
    frames = spread(48, 1, 2, grid=TokenGrid(4, 3, 4), cut="rows")
    assert frames.own(torch.arange(48), 0).tolist() == list(range(24, 48))
    assert spread(48, 0, 3, grid=TokenGrid(2, 4, 6), cut="bands").sizes == (16, 16, 16)
    assert spread(48, 0, 3, grid=TokenGrid(2, 4, 6), cut="rows").sizes == (24, 12, 12)
    assert spread(48, 0, 5, grid=TokenGrid(2, 4, 6), cut="rows").sizes == (10, 10, 10, 9, 9)  # more places than rows
    assert spread(48, 0, 3, grid=TokenGrid(2, 4, 6), cut="runs").sizes == (16, 16, 16)
    assert spread(47, 0, 2, grid=TokenGrid(2, 4, 6), cut="rows").grid is None  # of other tokens


@pytest.mark.parametrize(
    ("token_ranges", "text"),
    [
        (
            spread(48, 0, 3, grid=TokenGrid(2, 4, 6), cut="rows"),
            "48 tokens, 2 frames x 4 rows x 6 columns, frame-major; split along rows: 2, 1, 1",
        ),
        (
            spread(24, 0, 2, grid=TokenGrid(1, 4, 6), cut="rows"),
            "24 tokens, 4 rows x 6 columns; split along rows: 2 x 2",
        ),
        (
            spread(48, 0, 2, grid=TokenGrid(4, 3, 4), cut="rows"),
            "48 tokens, 4 frames x 3 rows x 4 columns, frame-major; split along frames: 2 x 2",
        ),
        (
            spread(48, 0, 3, grid=TokenGrid(2, 4, 6), cut="bands"),
            "48 tokens, 2 frames x 4 rows x 6 columns, frame-major; split along rows: 3 x 16 tokens",
        ),
        (spread(7, 0, 2), "7 tokens; split in runs: 4, 3"),
    ],
)
def test_a_person_can_read_it(token_ranges: TokenRanges, text: str) -> None:
    assert str(token_ranges) == text


def test_what_is_cut_by_what() -> None:
    by_strategy = {
        "exact": "runs",
        "displaced": "bands",
        "fresh-edges": "bands",
        "fresh-edges:context=partials": "bands",
        "fresh-edges:context=pooled": "rows",
        "pcpp": "rows",
        "pcpp:context=paper": "rows",
    }
    assert {each: cut_for(parse_strategy(each).policy) for each in by_strategy} == by_strategy


WAYS = ("gather", "ring", "two-way-ring", "token-ring")


@pytest.mark.parametrize(
    ("name", "cut"),
    first_of(
        [
            ("WanTransformer3DModel", "rows"),
            ("HunyuanVideoTransformer3DModel", "rows"),
            ("LTXVideoTransformer3DModel", "bands"),
        ],
        ("WanTransformer3DModel", "rows"),
    ),
)
def test_rows_of_every_frame_are_exact(name: str, cut: Cut) -> None:
    """Tokens of a place that do not lie together; with masks, tables, modulation by token, and text beside them."""
    for ranks in (2, 3):
        mode = partial(attend_together, AttentionMode())
        found = split(name, plan_for(name), ranks, 1, mode=mode, cut=cut)
        images = [
            each
            for _, token_ranges in found
            for n, each in token_ranges.items()
            if "refiner" not in n and "text" not in n
        ]
        assert {each.across.planes for each in images} == {2}
        assert error([got for got, _ in found], plain(name, 1)) <= LIMIT
    alone = split(name, plan_for(name), 2, 1, mode=None, cut=cut)
    assert error([got for got, _ in alone], plain(name, 1)) > 10 * LIMIT


@pytest.mark.parametrize("keys", [*(AttentionMode(algorithm=way) for way in WAYS), AttentionMode(ulysses=3)], ids=str)
@pytest.mark.parametrize("masked", ["", "columns", "rows and columns", "causal"])
def test_every_way_of_exchanging_keys_of_rows_of_every_frame(keys: AttentionMode, masked: str) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 3, 5 + 48, 8, generator=generator)  # text first
    masks = {
        "columns": torch.randn(2, 1, 1, 53, generator=generator),
        "rows and columns": torch.randn(1, 3, 53, 53, generator=generator),
    }
    options = {"attn_mask": masks.get(masked), "is_causal": masked == "causal"}
    want = nn.functional.scaled_dot_product_attention(whole, whole, whole, **options)
    rows = TokenRows(2, None, 0)

    def attend(transport):
        axis = Axis("patch", transport.rank, 3, (0, 1, 2))
        token_ranges = spread(48, transport.rank, 3, grid=TokenGrid(2, 4, 6), cut="rows")
        own = rows.cut(whole, token_ranges)
        split_ = TokenSplit(Communicator(transport), axis, partial(attend_together, keys))
        asked = AttentionCall(query=own, key=own, value=own, **options)
        out = attend_split(split_, "here", CallRuns([(AttentionTokens(rows, rows), token_ranges)]), asked)
        return (out - rows.cut(want, token_ranges)).abs().max().item()

    assert max(on_threads(3, attend)) <= LIMIT


def test_as_many_tokens_in_another_grid() -> None:
    """5 rows of 7 and 7 rows of 5: the arguments are of the same shapes."""
    tiny = TRANSFORMERS["FluxTransformer2DModel"]
    model, plan = tiny.build(), plan_for("FluxTransformer2DModel")
    upright = tiny.call(0)
    ids = upright["img_ids"]
    lying = upright | {"img_ids": ids[torch.argsort(10 * ids[:, 2] + ids[:, 1])][:, [0, 2, 1]]}

    def two_images(transport):
        shard = TransformerSharder(
            model, plan, TokenSplit(Communicator(transport), Axis("patch", 0, 1, (0,)), None, cut="rows")
        )
        grids = []
        for call in (upright, lying):
            shard.begin()
            shard.denoise(model.forward, **call)
            grids.append(shard.ranges["transformer_blocks"].grid)
        return grids

    assert on_threads(1, two_images) == [[TokenGrid(1, 5, 7), TokenGrid(1, 7, 5)]]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("exact", "blocks: 48 tokens; split in runs: 2 x 24"),
        ("displaced", "blocks: 48 tokens, 2 frames x 4 rows x 6 columns, frame-major; split along rows: 2 x 24 tokens"),
        ("pcpp", "blocks: 48 tokens, 2 frames x 4 rows x 6 columns, frame-major; split along rows: 2 x 2"),
    ],
)
def test_the_first_call_says_whose_tokens_are(strategy: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    tiny = TRANSFORMERS["WanTransformer3DModel"]
    models = [tiny.build() for _ in range(2)]

    def calls(transport):
        axis = Axis("patch", transport.rank, 2, (0, 1))
        layer = parse_strategy(strategy).install(models[axis.rank], Communicator(transport), axis, clock=StepClock())
        layer.plan = plan_for("WanTransformer3DModel")
        with torch.no_grad():
            for _ in range(2):
                layer.denoise(models[axis.rank].forward, **tiny.call(1))

    with caplog.at_level("INFO", "patchpar.shard.transformer.denoiser"):
        assert on_threads(2, calls, deadline=30.0) == [None, None]
    assert [record.getMessage() for record in caplog.records] == [f"WanTransformer3DModel, {message}"]
