"""Arguments of a block that are known again: our tokens of them are those that a look at every leaf finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.shard.transformer.block_arguments import ArgumentRule, leaves_and_form, with_leaves
from patchpar.shard.transformer.block_call import BlockRuns
from patchpar.shard.transformer.known_arguments import CutItems, KnownArguments
from patchpar.shard.transformer.local_tokens import LocalTokens, TokenSource, local_tokens
from patchpar.shard.transformer.token_plan import BlockPlan, TokenRows
from patchpar.shard.transformer.token_ranges import spread
from patchpar.shard.transformer.token_runs import Runs, cut_runs

ROWS, TEXT_ROWS, TABLE = TokenRows(1), TokenRows(1), TokenRows(0)
TOKENS, TEXT = 8, 4
RANGES, TEXT_RANGES = (spread(tokens, 1, 2) for tokens in (TOKENS, TEXT))
PLAN = BlockPlan(
    name="blocks",
    kind="Block",
    paths=("blocks.0",),
    signature=(),
    inputs={},
    counts=(),
    attentions=(),
    outputs={},
    ratio=1,
)
RULE = ArgumentRule(PLAN, inputs=((0, ROWS), (3, TABLE)), text=((1, TEXT_ROWS),))


def found(*, text: bool = True, rule: ArgumentRule = RULE) -> BlockRuns:
    return BlockRuns(PLAN, rule, RANGES, TEXT_RANGES if text else None)


def local(own: Tensor, runs: Runs) -> LocalTokens:
    return local_tokens(own, TokenSource(runs, "blocks.0", lambda own, _: own))


def call(runs: BlockRuns) -> dict[str, Any]:
    """Arguments as a block before has made them: image, text, a vector, a table of positions, and what has none."""
    text = torch.randn(1, TEXT, 3)
    return {
        "hidden_states": local(torch.randn(1, RANGES.count, 3), runs.inputs[0]),
        "encoder_hidden_states": text if runs.text is None else local(text[:, : runs.text.count], runs.inputs[1]),
        "temb": torch.randn(1, 3),
        "image_rotary_emb": (torch.randn(TOKENS, 2), torch.randn(TOKENS, 2)),
        "guidance": None,
        "more": {},
    }


def known(runs: BlockRuns, kwargs: dict[str, Any], *args: Any, splits_text: bool = True) -> KnownArguments | None:
    return KnownArguments.of(runs, leaves_and_form((args, kwargs))[0], args, kwargs, splits_text=splits_text)


@pytest.mark.parametrize("text", [True, False], ids=["its own part of the text", "all of the text"])
def test_our_tokens_are_those_that_a_look_at_every_leaf_finds(text: bool) -> None:
    runs = found(text=text)
    earlier = known(runs, call(runs), splits_text=text)
    assert earlier is not None
    kwargs = call(runs)
    leaves, form = leaves_and_form(kwargs)
    looked_at = [x.own if isinstance(x, LocalTokens) else x for x in leaves]
    looked_at[3] = cut_runs(leaves[3], runs.inputs[3])
    wanted = with_leaves(form, looked_at)
    own = earlier.own(kwargs, cut_runs, CutItems())
    assert own is not None
    assert own.keys() == wanted.keys()
    for name, value in wanted.items():
        for mine, other in zip(leaves_and_form(own[name])[0], leaves_and_form(value)[0], strict=True):
            assert mine is other if other is None else torch.equal(mine, other)
    assert own["image_rotary_emb"][0].shape[0] == RANGES.count, "what is compared is cut"


OTHER_RUNS = found().inputs[0]
CHANGES: dict[str, dict[str, Any]] = {
    "a whole tensor": {"hidden_states": torch.randn(1, TOKENS, 3)},
    "tokens of another call": {"hidden_states": local(torch.randn(1, RANGES.count, 3), OTHER_RUNS)},
    "more dims of tokens": {"encoder_hidden_states": torch.randn(1, 1, TEXT, 3)},
    "more dims of a vector": {"temb": torch.randn(1, 1, 3)},
    "a longer tuple": {"image_rotary_emb": (torch.randn(TOKENS, 2),) * 3},
    "other dims in a tuple": {"image_rotary_emb": (torch.randn(TOKENS, 2), torch.randn(TOKENS))},
    "a list": {"image_rotary_emb": [torch.randn(TOKENS, 2), torch.randn(TOKENS, 2)]},
    "a number": {"guidance": 3.5},
    "a dict with an item": {"more": {"scale": 1.0}},
    "one more": {"mask": None},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_looked_at(change: str) -> None:
    runs = found()
    earlier = known(runs, call(runs))
    assert earlier is not None
    assert earlier.own(call(runs) | CHANGES[change], cut_runs, CutItems()) is None


def test_tokens_that_have_been_gathered_are_looked_at() -> None:
    runs = found()
    earlier, kwargs = known(runs, call(runs)), call(runs)
    assert earlier is not None
    kwargs["hidden_states"].whole()
    assert earlier.own(kwargs, cut_runs, CutItems()) is None


def test_calls_of_which_more_is_computed_are_not_known() -> None:
    """Of whole tokens, or of a text that is to be split, how they are split is computed in each call."""
    runs = found()
    whole = call(runs) | {"hidden_states": torch.randn(1, TOKENS, 3)}
    assert known(runs, whole) is None
    assert known(found(text=False), call(found(text=False)), splits_text=True) is None
    assert known(runs, call(runs) | {"more": {"scale": 1.0}}) is None
    first, *_ = kwargs = call(runs)
    assert known(runs, {name: x for name, x in kwargs.items() if name != first}, kwargs[first]) is None
    counted = ArgumentRule(PLAN, inputs=RULE.inputs, counts=(4,), text=RULE.text)
    assert known(found(rule=counted), call(found(rule=counted))) is None


def rotary_of_blocks(change: Callable[[Any], Any] = lambda rotary: rotary) -> tuple[int, Any, Any]:
    """How often a tensor is cut in two blocks that get the same tuple, changed between them, and what both have."""
    runs, items, cuts = found(), CutItems(), list[Tensor]()
    kwargs = call(runs)
    earlier = known(runs, kwargs)
    assert earlier is not None

    def cut(x: Tensor, wanted: Runs) -> Tensor:
        cuts.append(x)
        return cut_runs(x, wanted)

    own = []
    for _ in range(2):
        block = earlier.own(kwargs, cut, items)
        assert block is not None
        own.append(block["image_rotary_emb"])
        kwargs["image_rotary_emb"] = change(kwargs["image_rotary_emb"])
    return len(cuts), *own


def test_a_tuple_that_several_blocks_get_is_cut_once() -> None:
    cuts, first, second = rotary_of_blocks()
    assert cuts == 1, "the table; the second tensor has no tokens that are split"
    assert second is first


def test_a_tuple_whose_tensor_has_been_changed_is_cut_again() -> None:
    def changed(rotary: Any) -> Any:
        rotary[0].add_(1)
        return rotary

    cuts, first, second = rotary_of_blocks(changed)
    assert cuts == 2
    assert second is not first


def test_another_tuple_of_the_same_tensors_is_cut_again() -> None:
    cuts, *_ = rotary_of_blocks(lambda rotary: (rotary[0], rotary[1] + 1))
    assert cuts == 2


def test_tensors_without_versions_are_cut_in_every_block() -> None:
    with torch.inference_mode():
        cuts, *_ = rotary_of_blocks()
    assert cuts == 2
