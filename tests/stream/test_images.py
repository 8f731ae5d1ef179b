"""A stream of images: the very images of the plain pipeline, its denoising steps spread over ranks."""

from __future__ import annotations

import copy
import queue
from operator import itemgetter
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.stream.images.stage import ImageStage, calls_of, finisher_of
from patchpar.stream.images.step_rotation import shared_steps
from patchpar.stream.messages import EndStream, ImageRequest
from tests.breadth import first_of
from tests.tiny import image_pipelines, transformer_pipelines
from tests.unit.threads import on_threads

IMAGES = 5
"""The first is drawn whole on every rank, and the ranks take turns at ending those that follow."""


def orders(arguments: dict[str, Any]) -> list[ImageRequest]:
    """Every image has a seed and a text of its own."""
    return [
        ImageRequest(number=n, arguments=arguments | {"prompt": f"picture {n}"}, seed=10 + n) for n in range(IMAGES)
    ]


def quiet(pipe: Any) -> Any:
    """Without a bar, and without dropout."""
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipe


def plain(pipe: Any, order: ImageRequest) -> Any:
    return pipe(**order.arguments, generator=torch.Generator().manual_seed(order.seed)).images


def on_rank(transport: Any, pipes: list[Any], todo: list[ImageRequest]) -> tuple[list[Any], int]:
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for order in [*todo, EndStream()]:
        waiting.put(order)
    found: list[Any] = []
    stage = ImageStage(pipes[transport.rank], transport.rank, len(pipes), Communicator(transport), str)
    generated = stage.run(lambda patience: waiting.get(), lambda number, result: found.append((number, result.images)))
    return found, generated


def same(one: Any, other: Any) -> bool:
    return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())


BUILT = {
    "sd img2img": image_pipelines.sd_img2img,
    "sd controlnet": image_pipelines.sd_controlnet,
    "flux": transformer_pipelines.flux,
}
RUNS = [("sd img2img", 3), ("sd controlnet", 2), ("flux", 1), ("flux", 4)]


@pytest.mark.parametrize(("name", "ranks"), first_of(RUNS, ("sd img2img", 3)))
def test_images_are_those_of_the_plain_pipeline(name: str, ranks: int) -> None:
    oracle, arguments = BUILT[name]()
    quiet(oracle)
    arguments |= {"num_inference_steps": 4, "output_type": "latent"}
    if "strength" in arguments:
        arguments["strength"] = 1.0
    todo = orders(arguments)
    copies = [copy.deepcopy(oracle) for _ in range(ranks)]
    found = on_threads(ranks, on_rank, copies, todo, deadline=60.0)
    assert not [error for error in found if isinstance(error, Exception)], found
    assert [generated for _, generated in found] == [IMAGES] * ranks
    ended = [[number for number, _ in results] for results, _ in found]
    assert ended == [
        [n for n in range(IMAGES) if (finisher_of(n, ranks, 4) if n else ranks - 1) == rank] for rank in range(ranks)
    ]
    results = sorted((pair for results, _ in found for pair in results), key=itemgetter(0))
    assert all(same(image, plain(oracle, order)) for (_, image), order in zip(results, todo, strict=True))
    assert not same(results[1][1], results[2][1])


def test_each_rank_computes_its_own_calls_only() -> None:
    pipe, arguments = image_pipelines.sd()
    arguments |= {"num_inference_steps": 4, "output_type": "latent"}
    computed: list[int] = []
    handle = quiet(pipe).unet.register_forward_pre_hook(lambda *_: computed.append(1))
    pipe.unet.conv_in.register_forward_hook(lambda *_: computed.append(2))
    with shared_steps(pipe, str) as recorded:
        whole = recorded.record(lambda: plain(pipe, orders(arguments)[0]))
        assert (recorded.calls, computed.count(2)) == (4, 4)
        computed.clear()
        assert recorded.run(lambda: plain(pipe, orders(arguments)[0]), range(2), [], ends=False) is None
        first = recorded.made
        assert computed.count(2) == 2
        computed.clear()
        again = recorded.run(lambda: plain(pipe, orders(arguments)[0]), range(2, 4), first, ends=True)
        assert computed.count(2) == 2
        wrong = recorded.run(lambda: plain(pipe, orders(arguments)[0]), range(2, 4), [-x for x in first], ends=True)
        assert recorded.run(lambda: plain(pipe, orders(arguments)[0]), range(2, 4), first, ends=False) is None
        given = [*first, *recorded.made]
        computed.clear()
        elsewhere = recorded.run(lambda: plain(pipe, orders(arguments)[0]), range(4, 4), given, ends=True)
        assert computed.count(2) == 0
    handle.remove()
    assert same(again, whole)
    assert same(elsewhere, whole)
    assert not same(wrong, whole), "what is given is used"
    assert not hasattr(pipe.unet, "_diffusers_hook")


def test_calls_are_shared_evenly_and_each_once() -> None:
    for calls in range(1, 9):
        for ranks in range(1, calls + 1):
            parts = [calls_of(rank, ranks, calls) for rank in range(ranks)]
            assert [call for recorded in parts for call in recorded] == list(range(calls))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(PlanError, match="at most 4 ranks"):
        calls_of(0, 5, 4)


def test_those_with_the_fewest_calls_take_turns_at_the_end() -> None:
    def enders(ranks: int, calls: int) -> list[int]:
        return [finisher_of(image, ranks, calls) for image in range(6)]

    assert enders(1, 4) == [0] * 6
    assert enders(2, 4) == [1, 0, 1, 0, 1, 0]
    assert enders(2, 5) == [0] * 6
    assert enders(3, 4) == [1, 0, 1, 0, 1, 0]
    assert enders(4, 4) == [3, 2, 1, 0, 3, 2]


@pytest.mark.parametrize("own", [range(2), range(2, 4), range(4, 4)])
@pytest.mark.parametrize("steps", first_of([1, 3, 5], 3))
def test_another_number_of_steps_is_refused(own: range, steps: int) -> None:
    pipe, arguments = image_pipelines.sd()
    quiet(pipe)

    def run(count: int) -> Any:
        return pipe(**arguments | {"num_inference_steps": count, "output_type": "latent"})

    with shared_steps(pipe, str) as recorded:
        recorded.record(lambda: run(4))
        recorded.run(lambda: run(4), range(own.start), [], ends=False) if own.start else None
        given = recorded.made if own.start else []
        if own.start or steps < 2:
            with pytest.raises(PlanError, match="the first one 4"):
                recorded.run(lambda: run(steps), own, given, ends=own.stop == 4)


def test_what_has_no_steps_is_refused() -> None:
    class Nothing:
        components: dict[str, Any] = {}  # noqa: RUF012

    with pytest.raises(UnsupportedModel, match="has no unet, transformer"), shared_steps(Nothing(), str):
        pass
