"""Which arguments carry the batch is held against the plain forward, and found out where shapes tell it wrongly."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from patchpar.errors import VerificationError
from patchpar.pipeline import denoiser_hook
from patchpar.shard.argument_changes import gives_back, with_given, without_given
from patchpar.shard.batch import Batch
from patchpar.shard.batch_arguments import NOT_SHARED, BatchArguments, carriers_in
from patchpar.shard.verification_cache import VerificationCache
from tests import tiny
from tests.breadth import first_of
from tests.tensors import relative
from tests.tokens.piped import plain, shared

TOLERANCE = 1e-5


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class Network(nn.Module):
    """Everybody's table has as many rows as the batch, the text one for each layer, places index the table."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mixes = 0, False

    def forward(
        self,
        sample: Tensor,
        text: Tensor,
        table: Tensor,
        positions: Tensor,
        residuals: list[Tensor],
        scale: float = 1.0,
    ) -> Tensor:
        self.calls += 1
        read = table[positions].sum(0)
        mixed = text.sum((0, 2)).mean(0) if self.mixes else 0.0
        return sample * read + text.sum((0, 2)) + residuals[0].sum(0) * scale + residuals[1] + mixed


def call_of(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Two branches of the same latents."""
    latents = noise(batch // 2, 6)
    sample = torch.cat([latents, latents])
    more = {
        "text": noise(batch, batch, 3, 6),  # layers, batch, tokens, width
        "table": noise(batch, 6),
        "positions": torch.arange(batch),
        "residuals": [torch.zeros(batch, 1, 6), noise(batch, 6, seed=2)],
    }
    return (sample,), more


def carriers(folder: Path) -> BatchArguments:
    return BatchArguments(Network(), 2, VerificationCache(folder), lambda key, known: known)


@pytest.mark.parametrize("batch", [2, 4])
def test_what_is_found(batch: int, tmp_path: Path) -> None:
    args, kwargs = call_of(batch)
    subject = carriers(tmp_path)
    found = subject.of(subject.network.forward, (args, kwargs))
    reported = {
        "[1].text": 1,
        "[1].table": None,
        "[1].positions": None,
        "[1].residuals[0]": None,
        "[1].residuals[1]": 0,
    }
    assert found == reported
    parts = [Batch.of(args[0], found).part((args, kwargs), rank, 2) for rank in range(2)]
    whole = subject.network(*args, **kwargs)
    assert torch.allclose(torch.cat([subject.network(*a, **k) for a, k in parts]), whole, atol=1e-6)


def test_what_another_rank_does_not_know_is_found_again(tmp_path: Path) -> None:
    """It uses what may have to be fetched from that rank, which would wait for nobody otherwise."""
    call, first = call_of(4), carriers(tmp_path)
    found = first.of(first.network.forward, call)
    second = BatchArguments(Network(), 2, VerificationCache(tmp_path), lambda key, known: False)
    assert second.of(second.network.forward, call) == found
    assert second.network.calls > 0


def test_it_is_found_once_and_kept(tmp_path: Path) -> None:
    call = call_of(4)
    first, second = carriers(tmp_path), carriers(tmp_path)
    found = first.of(first.network.forward, call)
    calls = first.network.calls
    assert first.of(first.network.forward, call) == found
    assert first.network.calls == calls
    assert second.of(second.network.forward, call) == found
    assert second.network.calls == 0
    next(tmp_path.glob("*.json")).write_text('{"carriers": ["no"]}')
    third = carriers(tmp_path)
    assert third.of(third.network.forward, call) == found  # what is kept is believed if it can be read


def test_without_branches_nothing_is_asked(tmp_path: Path) -> None:
    subject = carriers(tmp_path)
    _, kwargs = call_of(4)
    assert subject.of(subject.network.forward, ((noise(4, 6),), kwargs)) == {}
    assert subject.network.calls == 0


def test_a_network_whose_batch_cannot_be_shared_is_refused_in_words(tmp_path: Path) -> None:
    subject = carriers(tmp_path)
    subject.network.mixes = True
    with pytest.raises(VerificationError, match=r"Network with its batch shared between 2 ranks.*cfg=1"):
        subject.of(subject.network.forward, call_of(4))
    assert not list(tmp_path.glob("*.json"))


def test_what_moves_nothing_stays_what_its_shape_says() -> None:
    network = Network()
    args, kwargs = call_of(4)
    more = kwargs | {"unused": noise(4, 2)}
    found, unmoved = carriers_in(lambda *a, unused, **k: network(*a, **k), (args, more), 2)
    assert "[1].unused" not in found
    assert "[1].unused" in unmoved


class Cached(nn.Module):
    """Keys and values of two samples, [2, batch, tokens], in a cache that a call fills, and those after it read."""

    def forward(self, sample: Tensor, cache: Tensor, fills: bool) -> tuple[Tensor | None, Tensor]:
        if fills:
            cache[0], cache[1] = 2 * sample, 3 * sample
            return None, cache
        return sample + cache[0] * cache[1], cache


def test_a_call_that_fills_a_cache_is_not_shared(tmp_path: Path) -> None:
    network, (sample,) = Cached(), call_of(2)[0]
    subject, cache = (
        BatchArguments(network, 2, VerificationCache(tmp_path), lambda key, known: known),
        torch.zeros(2, 2, 6),
    )
    assert subject.of(network.forward, ((sample, cache, True), {})) == NOT_SHARED
    assert subject.of(network.forward, ((sample, cache, False), {})) == {"[0][1]": 1}
    again = BatchArguments(network, 2, VerificationCache(tmp_path), lambda key, known: known)
    assert again.of(network.forward, ((sample, cache, True), {})) == NOT_SHARED


def test_what_a_call_gives_back_is_that_of_the_whole_call() -> None:
    whole, own, sent = torch.zeros(2, 2), torch.zeros(2, 1), torch.ones(1)
    output = (sent, {"cache": own})
    assert gives_back(output, [own])
    assert not gives_back(output, [whole])
    assert without_given(output, [own]) == (sent, {"cache": None})
    joined = with_given((torch.ones(2), {"cache": None}), output, [own], [whole])
    assert joined[1]["cache"] is whole
    assert torch.equal(joined[0], torch.ones(2))


CASES = {
    "hidream": {"prompt": ["a small red house", "a blue boat"]},  # four samples, and text of four layers
    "allegro": {},  # positions of tokens in tables that two samples share
    "cogvideox_image": {"height": 16, "width": 16, "num_frames": 5},  # a rotary table of two tokens
    "kandinsky22_combined": {},  # made of pipelines, the second of which has the denoiser
    "sd_controlnet": {},  # the ControlNet is checked by itself: its states reach whole and shared denoisers alike
}


@pytest.mark.parametrize("name", first_of(CASES, "allegro", "sd_controlnet"))
def test_pipelines(name: str, tmp_path: Path) -> None:
    options: Any = CASES[name]
    want = plain(name, **options)
    for got in shared(name, "cfg=2", tmp_path, **options):
        assert relative(got, want) <= TOLERANCE


def without_room(monkeypatch: pytest.MonkeyPatch, short: tuple[int, ...], *, mixes: bool = False) -> list[int]:
    """Some ranks, here threads, have no memory for both branches of 32 x 32 latents; returns widths of such calls."""
    on_own_lists, tried = denoiser_hook.on_own_lists, list[int]()

    def limited(plain: Any) -> Any:
        forward = on_own_lists(plain)

        def run(sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            if len(sample) == 2:
                tried.append(sample.shape[-1])
                if sample.shape[-1] > 16 and int(threading.current_thread().name.rpartition("_")[2]) in short:
                    raise torch.OutOfMemoryError("both branches do not fit")
            output = forward(sample, *args, **kwargs)
            return (output[0] + output[0].mean(0), *output[1:]) if mixes else output

        return run

    monkeypatch.setattr(denoiser_hook, "on_own_lists", limited)
    return tried


@pytest.mark.parametrize(
    ("name", "short", "more"),
    [
        ("sd", (0, 1), {}),
        ("sd", (1,), {}),
        ("sd_controlnet", (0, 1), {"image": Image.linear_gradient("L").convert("RGB")}),
    ],
)
def test_where_both_branches_do_not_fit_fewer_tokens_are_compared(
    name: str, short: tuple[int, ...], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has memory for its own branch: a comparison that takes more refuses nothing."""
    size = {"height": 256, "width": 256, **more}
    want = plain(name, **size)
    tried = without_room(monkeypatch, short)
    for got in shared(name, "cfg=2", tmp_path, **size):
        assert relative(got, want) <= TOLERANCE
    assert set(tried) == {32, 16}


def test_branches_that_are_mixed_are_found_with_fewer_tokens_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch, (0, 1), mixes=True)
    with pytest.raises(VerificationError, match="UNet2DConditionModel with its batch shared between 2 ranks"):
        shared("sd", "cfg=2", tmp_path, height=256, width=256)


class _Later:
    """Changes what a block returns from the second call of a network on."""

    def __init__(self, own: Any, change: Any) -> None:
        self.own, self.change, self.calls = own, change, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        out = self.own(*args, **kwargs)
        return self.change(out) if self.calls > 1 else out


def with_code(change: Any) -> Any:
    """Builds pipelines with foreign code in their denoiser."""

    def build(name: str) -> Any:
        found = tiny.build(name)
        block = found.pipe.unet.mid_block.resnets[0]
        block.forward = _Later(block.forward, change)
        return found

    return build


def test_foreign_code_is_compared_with_fewer_tokens_where_both_branches_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, build = {"height": 256, "width": 256}, with_code(lambda x: x * 0.5)
    want = plain("sd", build=build, **size)
    tried = without_room(monkeypatch, (1,))
    for got in shared("sd", "cfg=2", tmp_path, build=build, **size):
        assert relative(got, want) <= TOLERANCE
    assert set(tried) == {32, 16}


def test_foreign_code_that_mixes_branches_is_refused_by_fewer_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch, (0, 1))
    with pytest.raises(VerificationError, match="mixes guidance branches in a way patchpar does not know"):
        shared("sd", "cfg=2", tmp_path, build=with_code(lambda x: x - x.mean(0, keepdim=True)), height=256, width=256)


def test_a_controlnet_whose_parts_do_not_make_the_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wrong states would go to the denoiser's own forward too, which a check of that alone would not show."""
    from diffusers import ControlNetModel

    forward = ControlNetModel.forward

    def mixing(self: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs["encoder_hidden_states"] = kwargs["encoder_hidden_states"] + kwargs["encoder_hidden_states"].mean(0)
        return forward(self, sample, *args, **kwargs)

    monkeypatch.setattr(ControlNetModel, "forward", mixing)
    with pytest.raises(VerificationError, match="ControlNetModel with its batch shared between 2 ranks"):
        shared("sd_controlnet", "cfg=2", tmp_path)
