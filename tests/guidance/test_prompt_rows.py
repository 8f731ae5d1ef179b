"""A denoiser call with our prompts, made one for all: where our rows are, and what stands in those of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel, VerificationError
from patchpar.plan.mesh import Axis
from patchpar.shard.batch import Batch
from patchpar.shard.foreign.check import ForeignCheck
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.data.prompt_check import FILLED, PromptCheck, PromptRows
from patchpar.strategies.data.split import PromptSlice
from patchpar.strategies.structure.patch_check import PatchCall, PatchCheck
from tests.exact import denoisers
from tests.exact.later import FIRST_WITH_EFFECT, CountingHook
from tests.tiny.transformers import TRANSFORMERS
from tests.tokens.test_memory import large_call
from tests.unit.threads import connected

FLUX = "FluxTransformer2DModel"


def images(*seeds: int) -> torch.Tensor:
    return torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@pytest.mark.parametrize(
    ("seeds", "prompts", "total", "positions"),
    [
        ((1,), (1, 2, 3), 3, (1,)),
        ((1, 2, 1, 2), (1, 3, 3), 6, (1, 2, 4, 5)),  # two prompts, two guidance branches
        ((1, 2, 3, 4), (0, 1, 2), 8, (0, 1, 2, 3)),  # four images of a prompt
        ((1, 1), (2, 4, 4), 4, (2, 3)),  # two prompts with the same latents
    ],
)
def test_where_they_are(seeds: tuple[int, ...], prompts: Any, total: int, positions: Any) -> None:
    """In each guidance branch at their position among all prompts."""
    rows = PromptRows.of(PromptSlice(*prompts), images(*seeds))
    assert rows is not None
    assert (rows.total, rows.positions) == (total, positions)
    assert [rows.sources()[position] for position in positions] == list(range(len(seeds)))
    assert rows.cut(2 * total, 2 * len(seeds)) == [2 * position + at for position in positions for at in (0, 1)]
    assert rows.cut(total + 1, len(seeds)) is None


def test_a_call_for_some_of_our_prompts_is_not_known() -> None:
    assert PromptRows.of(PromptSlice(0, 2, 4), images(1)) is None


def test_other_rows_hold_other_numbers() -> None:
    """Of images and texts, in tensors and lists; a timestep, a size, or what belongs to no prompt is as it was."""
    sample, text, time, table = images(1, 2), torch.randn(2, 5, 3), torch.tensor([7.0, 7.0]), torch.randn(9, 3)
    rows = PromptRows.of(PromptSlice(1, 3, 3), sample)
    assert rows is not None
    call = (sample,), {"text": text, "time": time, "table": table, "texts": [text[0], text[1]], "count": 3}
    (whole,), found = Batch.of(sample).at_rows(call, rows.sources(), rows.factors())
    assert torch.equal(whole[1:], sample)
    assert torch.equal(whole[0], FILLED * sample[0])
    assert torch.equal(found["text"], torch.stack([FILLED * text[0], text[0], text[1]]))
    assert torch.equal(torch.stack(found["texts"]), found["text"])
    assert torch.equal(found["time"], torch.full((3,), 7.0))
    assert found["table"] is table
    assert found["count"] == 3
    assert torch.equal(rows.ours_in([whole], by_item=False)[0], sample)
    assert torch.equal(torch.stack(rows.ours_in(found["texts"], by_item=True)), text)


def test_code_that_begins_something_beside_a_cache_of_diffusers_is_refused(tmp_path: Path) -> None:
    """The plain call to compare with runs all blocks, which the cache leaves out by then."""
    network, call = TRANSFORMERS[FLUX].build(), TRANSFORMERS[FLUX].call(0)
    network.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    network.proj_out.register_forward_hook(CountingHook())
    (transport,) = connected(1)
    with closing(transport), torch.no_grad(), network.cache_context("cond"):
        foreign = ForeignCheck(network, (Communicator(transport), Axis("data")), VerificationCache(tmp_path))
        check = PromptCheck(network, Axis("data", 1, 2, (0, 1)), foreign, is_alone=True)
        check.begin({"prompt": ["a red house", "a blue boat"] * 2})
        for _ in range(FIRST_WITH_EFFECT):
            check.run(partial(network, **call), network.forward, ((), call))
        words = r"does what it did not in earlier steps, beside a cache of diffusers.*disable_cache\(\), or use data=1"
        with pytest.raises(UnsupportedModel, match=words):
            check.run(partial(network, **call), network.forward, ((), call))


class _Later:
    """Changes an output [B, ...] from the second call on."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change, self.calls = change, 0

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return self.change(output) if self.calls > 1 else output


def halved(x: Tensor) -> Tensor:
    return x * 0.5


def without_mean(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def short_of_memory(network: nn.Module, argument: str, fits: int, tried: list[int]) -> Callable[..., Any]:
    """The network's forward, for which there is memory for so many elements of an argument only."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        tried.append(kwargs[argument].numel())
        if tried[-1] > fits:
            raise torch.OutOfMemoryError("too little")
        return network(*args, **kwargs)

    return forward


def refusal_of(change: Any, what: str) -> Any:
    """What a comparison says of a change, if anything."""
    return nullcontext() if change is halved else pytest.raises(VerificationError, match=f"mixes {what}")


@pytest.mark.parametrize("change", [halved, without_mean])
def test_where_the_prompts_of_all_do_not_fit_fewer_tokens_are_compared(change: Any, tmp_path: Path) -> None:
    """And what is proved there is not compared again."""
    network, call, tried = TRANSFORMERS[FLUX].build(), large_call(FLUX), list[int]()
    network.proj_out.register_forward_hook(_Later(change))
    own = call["hidden_states"].numel()
    (transport,) = connected(1)
    with closing(transport), torch.no_grad():
        foreign = ForeignCheck(network, (Communicator(transport), Axis("data")), VerificationCache(tmp_path))
        check = PromptCheck(network, Axis("data", 1, 2, (0, 1)), foreign, is_alone=True)
        check.begin({"prompt": ["a red house", "a blue boat"] * 2})
        plain = short_of_memory(network, "hidden_states", own, tried)
        run = partial(check.run, partial(network, **call), plain, ((), call))
        run()
        tried.clear()
        with refusal_of(change, "prompts"):
            run()
        assert tried == [2 * own, own, own // 2]
        if change is halved:
            run()
            assert len(tried) == 3


@pytest.mark.parametrize("change", [halved, without_mean])
def test_where_all_branches_of_a_patch_do_not_fit_fewer_tokens_are_compared(change: Any, tmp_path: Path) -> None:
    """Patches of a large image: the branches of one of them."""
    network, call, tried = denoisers.build("sd"), denoisers.call("sd", 32, 32), list[int]()
    network.conv_out.register_forward_hook(lambda module, args, output: change(output))
    size = call["sample"].numel()
    own: Any = {name: x[:1] if isinstance(x, Tensor) else x for name, x in call.items()}
    (transport,) = connected(1)
    with closing(transport), torch.no_grad():
        check = PatchCheck(network, Communicator(transport), VerificationCache(tmp_path))
        plain = short_of_memory(network, "sample", size // 2, tried)
        patch = PatchCall(plain=plain, whole=((), call), own=((), own), branch=0, branches=2)
        run = partial(check.run, partial(network, **own), patch)
        with refusal_of(change, "guidance branches"):
            run()
        assert tried == [size, size // 4, size // 8]
        if change is halved:
            run()
            assert len(tried) == 3
