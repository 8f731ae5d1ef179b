"""What split transformers exchange, what they refuse, and that nothing is left of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.pytree import map_leaves
from patchpar.errors import PlanError, UnsupportedModel, VerificationError
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.all_gather import attend_gathered, attend_in_parts
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.transformer import verify
from patchpar.shard.transformer.attention import Mode, TokenSplit, attend_split
from patchpar.shard.transformer.attention_mask import _sees_itself_alone
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.split_tokens import CallRuns, SplitTokens
from patchpar.shard.transformer.token_plan import AttentionTokens, TokenPlan, TokenRows
from patchpar.shard.transformer.token_ranges import spread
from patchpar.shard.transformer.token_runs import TokenRun
from patchpar.shard.transformer.verify import compared, compared_call, refusal
from patchpar.shard.verification import ROUNDINGS, largest_error
from tests.breadth import first_of
from tests.unit.threads import on_threads

from .ranks import LIMIT, TRANSFORMERS, error, hooks_of, plain, plan_of, predictions, split

MODES = {
    "ring": AttentionMode(algorithm="ring"),
    "two-way-ring": AttentionMode(algorithm="two-way-ring"),
    "token-ring": AttentionMode(algorithm="token-ring"),
    "gather-in-parts": AttentionMode(overlap=True),
    "ulysses": AttentionMode(ulysses=3),
}
KINDS = (
    "FluxTransformer2DModel",  # text first
    "SD3Transformer2DModel",  # text last
    "QwenImageTransformer2DModel",  # a mask over text and image
    "Lumina2Transformer2DModel",  # a mask, samples of different lengths, grouped heads
    "OmniGenTransformer2DModel",  # a mask of queries and keys
    "PRXTransformer2DModel",  # text that sees nothing
)


@pytest.mark.parametrize("mode", first_of(MODES, "ring", "ulysses"))
@pytest.mark.parametrize("name", first_of(KINDS, KINDS[2]))
def test_any_exact_mode(name: str, mode: str) -> None:
    got = split(name, plan_of(name), 3, 0, partial(attend_together, MODES[mode]))
    assert error(got, plain(name, 0)) <= LIMIT


def flux(plan: TokenPlan, ranks: int, use: Any, mode: Mode | None = attend_gathered) -> list[Any]:
    """What `use(shard, model)` gives on every rank, or the error it raises."""
    models = [TRANSFORMERS["FluxTransformer2DModel"].build() for _ in range(ranks)]

    def on_rank(transport: Any) -> Any:
        axis = Axis("patch", transport.rank, ranks, tuple(range(ranks)))
        shard = TransformerSharder(models[transport.rank], plan, TokenSplit(Communicator(transport), axis, mode))
        with torch.no_grad():
            return use(shard, models[transport.rank])

    return on_threads(ranks, on_rank)


CALL = TRANSFORMERS["FluxTransformer2DModel"].call


@pytest.fixture(scope="module")
def plan() -> TokenPlan:
    return plan_of("FluxTransformer2DModel")


def test_bytes(plan: TokenPlan) -> None:
    """K and V of our image and text tokens to everyone in each block; of all that only the prediction is gathered."""

    def traffic(shard: TransformerSharder, model: Any) -> Any:
        shard.denoise(model.forward, **CALL(0))
        counted = shard.split.comm.traffic
        return dict(counted.bytes_sent), dict(counted.rounds)

    for rank, (sent, rounds) in enumerate(flux(plan, 3, traffic)):
        tokens, texts, hidden, predicted, blocks = (12, 12, 11)[rank], 4, 36, 16, 5
        assert sent["kv"] == blocks * 2 * 2 * (2 * (tokens + texts) * hidden * 4)  # to 2 places, K and V, batch 2, fp32
        assert sent["tokens"] == 2 * (2 * tokens * predicted * 4)
        assert rounds == {"kv": blocks, "tokens": 1}


def test_what_the_model_does_between_blocks(plan: TokenPlan) -> None:
    """A ControlNet adds to the tokens after each block: to each rank's own, so that nothing is gathered for that."""
    residuals = [torch.randn(2, 35, 36, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    call = CALL(0) | {"controlnet_block_samples": residuals}

    def prediction(shard: TransformerSharder, model: Any) -> Any:
        before = predictions(model(**call))
        after = predictions(shard.denoise(model.forward, **call))
        return before, after, dict(shard.split.comm.traffic.rounds)

    for before, after, rounds in flux(plan, 2, prediction):
        assert rounds == {"kv": 5, "tokens": 1}
        assert error([after], before) <= LIMIT
        assert error([predictions(TRANSFORMERS["FluxTransformer2DModel"].build()(**CALL(0)))], before) > 0.01


def test_nothing_is_left(plan: TokenPlan) -> None:
    def restored(shard: TransformerSharder, model: Any) -> Any:
        hooked = set(hooks_of(model))
        first = model(**CALL(0))[0]
        shard.denoise(model.forward, **CALL(0))
        shard.restore()
        shard.restore()
        return hooked, hooks_of(model), first, model(**CALL(0))[0]

    for hooked, left, before, after in flux(plan, 2, restored):
        assert hooked == plan.paths | {f"{path}.attn" for path in plan.paths}
        assert left == []
        assert torch.equal(before, after)


def test_one_rank(plan: TokenPlan) -> None:
    (got,) = flux(plan, 1, lambda shard, model: predictions(shard.denoise(model.forward, **CALL(0))))
    assert error([got], plain("FluxTransformer2DModel", 0)) == 0


def test_too_few_tokens(plan: TokenPlan) -> None:
    call = CALL(0)
    call |= {"hidden_states": call["hidden_states"][:, :2], "img_ids": call["img_ids"][:2]}
    for found in flux(plan, 3, lambda shard, model: shard.denoise(model.forward, **call)):
        assert isinstance(found, PlanError)
        assert "has 2 tokens, too few for 3 ranks: use a larger image, or at most 2 ranks" in str(found)


def test_called_otherwise_than_watched(plan: TokenPlan) -> None:
    """What it was not watched with is refused, not done whole on every rank in silence."""
    call = CALL(0) | {"joint_attention_kwargs": {"attention_mask": torch.ones(2, 1, 1, 47, dtype=torch.bool)}}
    for found in flux(plan, 2, lambda shard, model: shard.denoise(model.forward, **call)):
        assert isinstance(found, UnsupportedModel)
        assert "transformer_blocks.0 was watched with other arguments" in str(found)
        assert "attention_mask" in str(found)


def test_after_an_error_the_model_is_usable(plan: TokenPlan) -> None:
    def twice(shard: TransformerSharder, model: Any) -> Any:
        with pytest.raises(RuntimeError):
            shard.denoise(model.forward, **CALL(0) | {"pooled_projections": torch.zeros(2, 31)})
        return predictions(shard.denoise(model.forward, **CALL(0)))

    assert error(flux(plan, 2, twice), plain("FluxTransformer2DModel", 0)) <= LIMIT


def checked(shard: TransformerSharder, model: Any, calls: Any) -> float:
    mesh = shard.split.comm, shard.split.axis
    return largest_error(mesh, compared(shard, model.forward, calls, mesh), *refusal(shard))


def test_verification(plan: TokenPlan) -> None:
    calls = [((), CALL(variant)) for variant in (0, 1)]
    for mode, differs in ((attend_in_parts, True), (attend_gathered, False)):  # one attention to all may be the same
        for found in flux(plan, 2, lambda shard, model: checked(shard, model, calls), mode=mode):
            assert found <= LIMIT
            assert found > 0 or not differs


def test_ranks_make_as_many_plain_calls(plan: TokenPlan) -> None:
    """Also where the error of one is above the limit: each may gather weights that the others have."""

    def calls(shard: TransformerSharder, model: Any) -> int:
        mesh, made = (shard.split.comm, shard.split.axis), list[Any]()

        def gathering(**call: Any) -> Any:
            made.append(AllGather(*mesh, "weights", "a block").same(torch.zeros(1)))
            return model.forward(**call)

        def differing(**call: Any) -> Any:
            output, factor = shard.denoise(model.forward, **call), 1 + 1e-3 * shard.split.axis.rank
            return map_leaves(lambda x: x * factor if isinstance(x, torch.Tensor) else x, output)

        ((comparison,),) = compared(shard, gathering, [((), CALL(0))], mesh, differing)
        assert (comparison.error > comparison.limit) == (shard.split.axis.rank == 1)
        return len(made)

    assert flux(plan, 2, calls) == [1 + ROUNDINGS, 1 + ROUNDINGS]


def test_ranks_compare_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only one has zeros among its arguments, as of an inactive ControlNet in one guidance branch."""
    monkeypatch.setattr(verify, "compared", lambda shard, forward, calls, together, split: len(calls))
    nothing: Any = None

    def calls(transport: Any, last: float) -> Any:
        axis, x = Axis("patch", transport.rank, 2, (0, 1)), torch.full((1, 2, 3), last if transport.rank else 1.0)
        return compared_call(nothing, nothing, ((x,), {}), (Communicator(transport), axis), nothing)

    assert on_threads(2, calls, 0.0) == [2, 2]
    assert on_threads(2, calls, 1.0) == [1, 1]


def test_verification_fails_without_exchange(plan: TokenPlan) -> None:
    found = flux(plan, 2, lambda shard, model: checked(shard, model, [((), CALL(0))]), mode=None)
    for each in found:
        assert isinstance(each, VerificationError)
        assert "split between 2 ranks differs from the plain one by" in str(each)


def test_dropout_and_foreign_masks() -> None:
    query = torch.randn(1, 2, 5, 8)

    def attend(transport: Any, **options: Any) -> Any:
        split_ = TokenSplit(Communicator(transport), Axis("patch", transport.rank, 2, (0, 1)), attend_gathered)
        call = AttentionTokens(TokenRows(2), TokenRows(2))
        asked = AttentionCall(query=query, key=query, value=query, **options)
        return attend_split(split_, "here", CallRuns([(call, spread(10, transport.rank, 2))]), asked)

    for found in on_threads(2, partial(attend, dropout_p=0.1)):
        assert isinstance(found, UnsupportedModel)
        assert "here: attention with dropout" in str(found)
    for found in on_threads(2, partial(attend, attn_mask=torch.ones(1, 1, 1, 7, dtype=torch.bool))):
        assert isinstance(found, UnsupportedModel)
        assert "a mask of 7 columns is neither for the 5 keys that are here nor for all 10" in str(found)


def test_runs_that_overlap() -> None:
    runs = [TokenRun(TokenRows(2, 0, None), spread(10, 0, 2)), TokenRun(TokenRows(2, 0, None), spread(4, 0, 2))]
    with pytest.raises(UnsupportedModel, match="two runs of split tokens overlap in 7 rows"):
        SplitTokens.of(7, runs)


def test_causality() -> None:
    """A token sees those before it, on whatever rank they are."""
    whole = torch.randn(1, 2, 10, 8)
    want = torch.nn.functional.scaled_dot_product_attention(whole, whole, whole, is_causal=True)

    def attend(transport: Any) -> Any:
        split_ = TokenSplit(Communicator(transport), Axis("patch", transport.rank, 2, (0, 1)), attend_gathered)
        own = whole[:, :, 5 * transport.rank : 5 * transport.rank + 5]
        asked = AttentionCall(query=own, key=own, value=own, is_causal=True)
        tokens = AttentionTokens(TokenRows(2), TokenRows(2))
        return attend_split(split_, "here", CallRuns([(tokens, spread(10, transport.rank, 2))]), asked)

    torch.testing.assert_close(torch.cat(on_threads(2, attend), 2), want, atol=1e-5, rtol=1e-5)


def _blind_to_each_other(tokens: int, texts: int, *, boolean: bool) -> torch.Tensor:
    """A mask as perturbed-attention guidance makes it in the block: a token sees itself and the text, a text all."""
    seen = torch.ones(tokens + texts, tokens + texts, dtype=torch.bool)
    seen[:tokens, :tokens] = torch.eye(tokens, dtype=torch.bool)
    return (seen if boolean else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf))[None, None]


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("mode", [attend_gathered, None], ids=["exchange", "none"])
def test_tokens_that_see_themselves_alone(mode: Mode | None, boolean: bool) -> None:
    """The mask is made of the tokens that are here; for the text those of other ranks are as ours."""
    image, text = torch.randn(1, 2, 11, 8), torch.randn(1, 2, 3, 8)
    whole = torch.cat([image, text], 2)
    mask = _blind_to_each_other(11, 3, boolean=boolean)
    want = torch.nn.functional.scaled_dot_product_attention(whole, whole, whole, attn_mask=mask)

    def attend(transport: Any) -> Any:
        parts = spread(11, transport.rank, 2)
        split_ = TokenSplit(Communicator(transport), Axis("patch", transport.rank, 2, (0, 1)), mode)
        own = torch.cat([parts.own(image, 2), text], 2)
        mask = _blind_to_each_other(parts.count, 3, boolean=boolean)
        asked = AttentionCall(query=own, key=own, value=own, attn_mask=mask)
        tokens = AttentionTokens(TokenRows(2, 0, 3), TokenRows(2, 0, 3), 4)
        return attend_split(split_, "here", CallRuns([(tokens, parts)]), asked)

    first, second = on_threads(2, attend)
    torch.testing.assert_close(torch.cat([first[:, :, :-3], second[:, :, :-3]], 2), want[:, :, :-3])
    texts = [(each[:, :, -3:] - want[:, :, -3:]).abs().max().item() for each in (first, second)]
    assert all(off <= LIMIT for off in texts) == (mode is not None), texts


def test_one_token_says_nothing_of_whether_tokens_see_themselves_alone() -> None:
    """So its rank gathers the mask, and ranks that have more tokens must not skip the message that it waits for."""
    for tokens, alone in ((4, True), (3, False)):  # the second rank has two of them, or one
        for rank in range(2):
            parts = spread(tokens, rank, 2)
            keys = SplitTokens.of(parts.count + 3, [TokenRun(TokenRows(2, 0, 3), parts)])
            assert _sees_itself_alone(_blind_to_each_other(parts.count, 3, boolean=True), keys) is alone
