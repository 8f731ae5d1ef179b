"""Nothing of an image is left in the next one: each is, bit for bit, what it is on ranks that never drew another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from tests.breadth import first_of
from tests.conftest import POOL_SIZE
from tests.tensors import relative
from tests.tiny import build

from .pipelines import WIDE, Case, Change, Happening, ImageCall

ROW = "tests.stale.pipelines:row_and_alone"
HOUSE, TOWER = ImageCall(steps=3), ImageCall(prompt="a blue tower at night", steps=3)
LYING = ImageCall(size=WIDE, steps=3)
FAILS = ImageCall(prompt="a wood", steps=3, fails_after=2)
PLANS = (
    "patch=2,strategy=displaced:warmup_steps=1",
    "patch=2,strategy=displaced:warmup_steps=1:preset=paper",
    "patch=2,strategy=pcpp:warmup_steps=1",
    "patch=3,strategy=fresh-edges:context=pooled:pool=2:bits=4",
    "patch=2,strategy=fresh-edges:context=partials:refresh=2",
    "patch=2,strategy=fresh-edges:quality=45",
    "patch=2,strategy=fresh-edges:budget=0.2",
    "cfg=2,patch=2,strategy=displaced:warmup_steps=1",
)


def check(ranks: Any, plan: str, *row: Happening) -> None:
    found = ranks.run(ROW, POOL_SIZE, Case(plan=plan), list(row))[0]
    assert len(found) == sum(isinstance(each, ImageCall) and each.fails_after is None for each in row)
    for in_a_row, alone in found:
        assert torch.equal(in_a_row.latents, alone.latents)
        assert (in_a_row.exact_calls, in_a_row.stale_calls) == (alone.exact_calls, alone.stale_calls)
    latents = [alone.latents for _, alone in found]
    assert relative(latents[0], latents[1]) > 1e-2  # it would not show otherwise


@pytest.mark.parametrize("plan", first_of(PLANS))
def test_prompts_sizes_and_a_failure_in_a_row(ranks: Any, plan: str) -> None:
    """The size changes there and back: other buffers, and bands of columns."""
    check(ranks, plan, HOUSE, TOWER, LYING, FAILS, TOWER)


@pytest.mark.breadth
def test_a_change_of_the_scheduler(ranks: Any) -> None:
    check(ranks, PLANS[0], HOUSE, TOWER, Change(scheduler="Heun"), HOUSE, Change(scheduler="LCM"), HOUSE)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as a file."""
    folder = tmp_path_factory.mktemp("lora")
    pipe = build("sd").pipe
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets))
    pipe.save_lora_weights(folder, unet_lora_layers=get_peft_model_state_dict(pipe.unet))
    return folder


@pytest.mark.parametrize("plan", first_of([PLANS[0], PLANS[4]]))
def test_an_adapter_comes_and_goes(ranks: Any, lora: Path, plan: str) -> None:
    come, go = Change(method="load_lora_weights", arguments=(str(lora),)), Change(method="unload_lora_weights")
    found = ranks.run(ROW, POOL_SIZE, Case(plan=plan), [HOUSE, come, HOUSE, go, HOUSE])[0]
    without, given, again = (in_a_row.latents for in_a_row, _ in found)
    assert torch.equal(without, again)
    assert torch.equal(without, found[0][1].latents)
    assert relative(given, without) > 1e-3
    assert torch.equal(given, found[1][1].latents)
