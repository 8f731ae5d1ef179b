"""Every prompt that README, docs and page give to an embedded model shows what it says, at its seed.

The classifier that judges was trained on renders alone (training/classifier.py).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch

from patchpar import ParallelPipeline, Plan, StructureGuidance
from patchpar.models.caption_words import SCENES, WORDS, caption_words, unknown_words
from patchpar.models.files import EMBEDDED, embedded_model
from patchpar.models.task import ANY_PROMPT
from tests.breadth import first_of
from tests.documented_prompts import distinct_prompts, documented_prompts
from training.classifier import Classifier, Judgement, judge, load_classifier
from training.scenes import COLORS, KINDS, TERRAINS, TIMES, vocabulary

ITEM = re.compile(rf"\b(?:({'|'.join(COLORS)}) )?({'|'.join(KINDS)})\b(?: on the (left|right))?")
PROMPTS = distinct_prompts()
CASES = {f"{number} {each.source}": each for number, each in enumerate(PROMPTS)}
DAILY = next(key for key, each in CASES.items() if each.source == "docs/howto/first-image.md" and each.steps)


def faults(judgement: Judgement, prompt: str) -> list[str]:
    """What the prompt asks for and the image does not show, and objects where it asks for none."""
    found, items = [], ITEM.findall(prompt)
    for color, kind, side in items:
        seen = [judgement.on(side)] if side else [judgement.left, judgement.right]
        count = sum(bool(look and look[0] == kind and (not color or look[1] == color)) for look in seen)
        if count != 1:
            found.append(f"{count} times {color} {kind} {side}")
    sides = {side for *_, side in items}
    if items and "" not in sides:
        found += [f"{judgement.on(side)} {side}" for side in {"left", "right"} - sides if judgement.on(side)]
    found += [f"no {each}" for each in TERRAINS if each in prompt and judgement.terrain != each]
    return found + [f"not {each}" for each in TIMES if each in prompt and judgement.time != each]


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load_classifier()


@cache
def opened(model: str, has_structure: bool) -> ParallelPipeline:
    plan = Plan(strategy=StructureGuidance()) if has_structure else Plan()
    pipe = ParallelPipeline.from_pretrained(model, devices="cpu", plan=plan)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", first_of(CASES, DAILY))
def test_the_image_shows_what_the_prompt_says(classifier: Classifier, name: str, tmp_path_factory: Any) -> None:
    case = CASES[name]
    generator = torch.Generator().manual_seed(case.seed)
    image = opened(case.model, case.has_structure)(**case.call, generator=generator, output_type="pt").images[0]
    judgement = judge(classifier, image[None].float() * 2 - 1)[0]
    assert faults(judgement, case.prompt) == [], (case, judgement)


@pytest.mark.parametrize("name", CASES)
def test_the_model_knows_its_words(name: str) -> None:
    case = CASES[name]
    assert unknown_words(case.prompt, caption_words(case.model)) == ()
    assert ITEM.search(case.prompt), "an object, which shows whether the prompt was followed"


def test_they_are_collected_everywhere() -> None:
    sources = {each.source for each in documented_prompts()}
    wanted = {"Makefile", "README.md", "app", "--help", "pipelines/scenes.py", "notebooks/first-image.ipynb"}
    assert wanted | {"docs/howto/serve.md", "docs/jobs.md", "docs/launching.md", "docs/embedded-model.md"} <= sources
    assert {each.model for each in PROMPTS} == {"embedded", "embedded-dit"}
    assert any(each.has_structure for each in PROMPTS)
    assert {each.seed for each in PROMPTS} > {0}


def test_another_image_would_be_seen() -> None:
    """The control: each part of a prompt counts."""
    prompt = "a red house on the left, green hills at sunset"
    right: dict[str, Any] = {"left": ("house", "red"), "right": None, "terrain": "green hills", "time": "at sunset"}
    assert faults(Judgement(**right), prompt) == []
    for change in (
        {"left": ("house", "blue")},
        {"left": None, "right": ("house", "red")},
        {"right": ("tree", None)},
        {"terrain": "desert dunes"},
        {"time": "at night"},
    ):
        assert faults(Judgement(**right | change), prompt), change
    assert faults(Judgement(**right | {"right": ("pine", None)}), "a red house and a pine") == []


def test_the_words_are_those_of_the_captions() -> None:
    assert sorted(SCENES.split()) == vocabulary()
    for model in ("embedded", "embedded-dit", str(embedded_model())):
        assert caption_words(model) == set(vocabulary())
    assert set(WORDS) == {name for pair in EMBEDDED.items() for name in pair} - {"embedded-face", "face-stream"}
    assert unknown_words("A red HOUSE, 2 foxes; a fox", caption_words("embedded")) == ("2", "foxes", "fox")
    assert unknown_words("2 foxes", caption_words("stabilityai/sdxl-turbo")) == ()


def test_the_model_says_which_words_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    small: dict[str, Any] = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "latent"}
    pipe = opened("embedded", False)
    pipe("a red fox, green hills", negative_prompt="snow", **small)
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("patchpar")]
    assert message == (
        f"the embedded model does not know 'fox', 'snow': the words that it has learnt are {', '.join(vocabulary())}"
    )
    caplog.clear()
    pipe("a red house, green hills", **small)
    pipe(ANY_PROMPT, **small)
    assert not [record for record in caplog.records if record.name.startswith("patchpar")]
