"""Verification and search where a plain forward does not fit in memory: with fewer tokens, on all ranks alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.errors import ExchangeError, PlanError, UnsupportedModel, VerificationError
from patchpar.plan.mesh import Axis
from patchpar.shard.transformer.plan_lookup import PlanSearch
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.discover import discover_tokens
from patchpar.shard.transformer.probe.smaller_call import smaller_calls
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch
from tests.breadth import first_of
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.threads import on_threads

from .ranks import LIMIT, predictions
from .test_interception import Denoiser, latent

FLUX, PIXART = "FluxTransformer2DModel", "PixArtTransformer2DModel"


def large_call(name: str) -> dict[str, Any]:
    """A call with 512 tokens or more."""
    call = TRANSFORMERS[name].call(0)
    if name == PIXART:
        return call | {"hidden_states": torch.randn(2, 4, 48, 48, generator=torch.Generator().manual_seed(0))}
    rows = torch.stack(torch.meshgrid(torch.arange(32.0), torch.arange(16.0), indexing="ij"), -1).reshape(-1, 2)
    width = call["hidden_states"].shape[-1]
    latent = torch.randn(2, len(rows), width, generator=torch.Generator().manual_seed(0))
    return call | {"hidden_states": latent, "img_ids": torch.cat([torch.zeros(len(rows), 1), rows], 1)}


def predicted(
    name: str, folder: Path | None, fits: int, exchange: str = "on", short: tuple[int, ...] = (1,)
) -> tuple[list[Any], list[int]]:
    """What two ranks predict, and the sizes of plain forwards on the second.

    `short`: those that have memory for `fits` elements only. Without a `folder` nothing is verified.
    """
    models, tried = [TRANSFORMERS[name].build() for _ in range(2)], list[int]()

    def on_rank(transport: Any) -> list[Tensor]:
        model: Any = models[transport.rank]
        axis, comm = Axis("patch", transport.rank, 2, (0, 1)), Communicator(transport)
        cache = None if folder is None else VerificationCache(folder / str(transport.rank))
        denoiser: Any = ExactPatch().install(model, comm, axis, verifications=cache)
        denoiser.exchange = exchange
        if exchange == "off":
            denoiser._split = lambda *args, plain=denoiser._split, **kwargs: plain(*args, wrong=True)

        def forward(*args: Any, **kwargs: Any) -> Any:
            size = CallArguments.of(model, args, kwargs).tensors()["hidden_states"].numel()
            if denoiser._shard is None or denoiser._shard.call is None:
                tried.extend([size] * transport.rank)
                if size > fits and transport.rank in short:
                    raise torch.OutOfMemoryError(f"{size} elements")
            return model.forward(*args, **kwargs)

        with torch.no_grad():
            return predictions(denoiser.denoise(forward, **large_call(name)))

    return on_threads(2, on_rank, deadline=60.0), tried


@pytest.mark.parametrize("name", first_of([FLUX, PIXART], FLUX, PIXART))
def test_fewer_tokens_where_memory_is_short(name: str, tmp_path: Path) -> None:
    call = large_call(name)
    size = call["hidden_states"].numel()
    found, tried = predicted(name, tmp_path, size // 2)
    with torch.no_grad():
        want = predictions(TRANSFORMERS[name].build()(**call))
    for got in found:
        assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT
    assert max(tried) == size
    assert any(0 < each <= size // 2 for each in tried)


def test_a_wrong_split_is_refused_all_the_same(tmp_path: Path) -> None:
    size = large_call(PIXART)["hidden_states"].numel()
    for found in predicted(PIXART, tmp_path, size // 2, "off")[0]:
        assert isinstance(found, VerificationError)


def test_where_nothing_fits(tmp_path: Path) -> None:
    """Every rank says so, also those with enough memory, and none waits for another."""
    for found in predicted(FLUX, tmp_path, 0)[0]:
        assert isinstance(found, PlanError)
        assert "does not fit in the memory of every rank" in str(found)
        assert "verify=False" in str(found)


def test_where_no_rank_can_search() -> None:
    for found in predicted(PIXART, None, 0, short=(0, 1))[0]:
        assert isinstance(found, PlanError)
        assert f"no rank has the memory to find the tokens of {PIXART} in a plain forward" in str(found)
        assert "use a smaller image first" in str(found)


class Failing(nn.Module):
    """A block that runs with all tokens only: with some of them `error` is raised."""

    def __init__(self, block: nn.Module, error: Exception, tokens: int) -> None:
        super().__init__()
        self.block, self.error, self.tokens = block, error, tokens

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] != self.tokens:
            raise self.error
        return self.block(x)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), ExchangeError("rank 1 is late")], ids=repr)
def test_what_is_no_property_of_a_block_is_not_taken_for_one(error: Exception) -> None:
    """It would be computed whole on every rank from then on, by the plan that is kept."""
    model = Denoiser()
    model.blocks = nn.ModuleList(Failing(block, error, 20) for block in model.blocks)
    with pytest.raises(type(error)) as raised:
        discover_tokens(model, model.forward, (), {"hidden_states": latent()})
    assert raised.value is error


@pytest.mark.parametrize("error", [AssertionError("all 20 tokens"), RuntimeError("all 20 tokens")], ids=repr)
def test_a_block_that_needs_all_tokens_is_refused_in_words(error: Exception) -> None:
    model = Denoiser()
    model.blocks = nn.ModuleList(Failing(block, error, 20) for block in model.blocks)
    with pytest.raises(UnsupportedModel, match="with some of its tokens alone it fails: all 20 tokens"):
        discover_tokens(model, model.forward, (), {"hidden_states": latent()})


def test_a_rank_that_is_lost_while_memory_is_short(tmp_path: Path) -> None:
    """Smaller calls are tried then, which may fail by themselves, but not for that."""
    model = TRANSFORMERS[FLUX].build()
    tried = list[int]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        tried.append(kwargs["hidden_states"].shape[1])
        if len(tried) == 1:
            raise torch.OutOfMemoryError("full")
        raise ExchangeError("rank 1 is late")

    def on_rank(transport: Any) -> Any:
        mesh = Communicator(transport), Axis("patch", 0, 1, (0,))
        with torch.no_grad():
            return PlanSearch(model, mesh, None).find(forward, ((), large_call(FLUX)))

    (found,) = on_threads(1, on_rank)
    assert isinstance(found, ExchangeError)
    assert tried == [512, 256]


def test_what_is_cut() -> None:
    call = large_call(FLUX)
    calls = list(smaller_calls(CallArguments((), (), call), "hidden_states"))
    assert [each.kwargs["hidden_states"].shape[1] for each in calls] == [256, 128, 64]
    for each in calls:
        tokens = each.kwargs["hidden_states"].shape[1]
        assert torch.equal(each.kwargs["hidden_states"], call["hidden_states"][:, :tokens])
        assert torch.equal(each.kwargs["img_ids"], call["img_ids"][:tokens])
        assert each.kwargs["encoder_hidden_states"] is call["encoder_hidden_states"]
    control = {"hidden_states": torch.ones(2, 4, 3, 48, 40), "mask": torch.ones(2, 1, 3, 48, 40)}
    shapes = [each.kwargs["mask"].shape[-2:] for each in smaller_calls(CallArguments((), (), control), "hidden_states")]
    assert shapes == [(32, 32), (16, 16)]
