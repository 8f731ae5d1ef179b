"""Foreign code in a network whose plain call does not fit in memory: compared in a call with fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError, VerificationError
from patchpar.plan.mesh import Axis
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.exact import ExactPatch
from tests.tensors import relative
from tests.tiny.transformers import TRANSFORMERS
from tests.unit.threads import on_threads

from .ranks import LIMIT, predictions
from .test_memory import FLUX, PIXART, large_call

Change = Callable[[Tensor, "Later"], Tensor]
LARGE = 200  # tokens: fewer than a rank has of the call, more than are in all of a call that fits


class Later:
    """Changes what a layer returns from the second call of the network on, and counts calls."""

    def __init__(self, change: Change) -> None:
        self.change, self.calls = change, 0
        self.last: Tensor | None = None

    def put_into(self, model: Any) -> None:
        layer = model.transformer_blocks[0].ff
        own = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            out = own(*args, **kwargs)
            return self.change(out, self) if self.calls > 1 else out

        layer.forward = forward


def scaled(x: Tensor, later: Later) -> Tensor:
    return x * 0.5


def centred(x: Tensor, later: Later) -> Tensor:
    return x - x.mean(1, keepdim=True)


def centred_if_large(x: Tensor, later: Later) -> Tensor:
    return centred(x, later) if x.shape[1] > LARGE else x


def weakly_centred_if_large(x: Tensor, later: Later) -> Tensor:
    return x - x.mean(1, keepdim=True) * (1.0 if x.shape[1] > LARGE else 0.0)


def other_factor_if_large(x: Tensor, later: Later) -> Tensor:
    return x * (0.5 if x.shape[1] > LARGE else 0.25)


def with_the_last(x: Tensor, later: Later) -> Tensor:
    """Adds what it kept of the call before."""
    last, later.last = later.last, x
    return x if last is None else x + last.flip(2) if later.calls > 2 else x + last


def predicted(
    name: str, folder: Path, fits: int, change: Change, number: int
) -> tuple[list[Any], list[Tensor], list[int]]:
    """What ranks predict in the last of some calls, what one process does, and how often each rank ran the network.

    The second rank has memory for a plain forward of `fits` elements only.
    """
    models, runs = [TRANSFORMERS[name].build() for _ in range(3)], [0, 0]
    for model in models:
        Later(change).put_into(model)

    def on_rank(transport: Any) -> list[Tensor]:
        model: Any = models[transport.rank]
        axis, comm = Axis("patch", transport.rank, 2, (0, 1)), Communicator(transport)
        cache = VerificationCache(folder / str(transport.rank))
        denoiser: Any = ExactPatch().install(model, comm, axis, verifications=cache)

        def forward(*args: Any, **kwargs: Any) -> Any:
            runs[transport.rank] += 1
            size = CallArguments.of(model, args, kwargs).tensors()["hidden_states"].numel()
            alone = denoiser._shard is None or denoiser._shard.call is None
            if alone and size > fits and transport.rank == 1:
                raise torch.OutOfMemoryError(f"{size} elements")
            return model.forward(*args, **kwargs)

        with torch.no_grad():
            for _ in range(number - 1):
                denoiser.denoise(forward, **large_call(name))
            runs[transport.rank] = 0
            return predictions(denoiser.denoise(forward, **large_call(name)))

    found = on_threads(2, on_rank, deadline=60.0)
    with torch.no_grad():
        for _ in range(number):
            want = predictions(models[2](**large_call(name)))
    return found, want, runs


@pytest.mark.parametrize("name", [FLUX, PIXART])
@pytest.mark.parametrize("change", [scaled, other_factor_if_large])
def test_what_it_does_is_compared_with_fewer_tokens(name: str, change: Change, tmp_path: Path) -> None:
    size = large_call(name)["hidden_states"].numel()
    found, want, runs = predicted(name, tmp_path, size // 4, change, 2)
    for got in found:
        assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT
    assert min(runs) >= 4  # the call, the plain one, and a smaller one in both ways


def test_what_is_proved_there_is_not_compared_again(tmp_path: Path) -> None:
    size = large_call(FLUX)["hidden_states"].numel()
    found, want, runs = predicted(FLUX, tmp_path, size // 4, scaled, 3)
    for got in found:
        assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT
    assert runs == [1, 1]


def test_what_mixes_tokens_is_refused_there(tmp_path: Path) -> None:
    size = large_call(FLUX)["hidden_states"].numel()
    for found in predicted(FLUX, tmp_path, size // 4, centred, 2)[0]:
        assert isinstance(found, VerificationError), found


REFUSED = {
    "at large sizes": (centred_if_large, 2, "in a call with fewer tokens this code does something else"),
    "by a factor of nothing": (weakly_centred_if_large, 2, "in a call with fewer tokens this code does something else"),
    "with what it has kept": (with_the_last, 3, "keeps from one call to the next are not those of a call with fewer"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_smaller_call_shows_is_refused(what: str, tmp_path: Path) -> None:
    """On all ranks, which say why."""
    change, number, words = REFUSED[what]
    size = large_call(FLUX)["hidden_states"].numel()
    for found in predicted(FLUX, tmp_path, size // 4, change, number)[0]:
        assert isinstance(found, PlanError), found
        assert words in str(found)
        assert "verify=False" in str(found)


def test_where_no_smaller_call_fits(tmp_path: Path) -> None:
    """Of a call that was verified before, with more memory."""
    size = large_call(FLUX)["hidden_states"].numel()
    predicted(FLUX, tmp_path, size, scaled, 1)
    for found in predicted(FLUX, tmp_path, 0, scaled, 2)[0]:
        assert isinstance(found, PlanError), found
        assert "nor is there one with fewer tokens that does" in str(found)
