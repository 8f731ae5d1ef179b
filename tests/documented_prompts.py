"""Every prompt that README, docs, page, help, recipes and notebooks give to an embedded model, with its settings."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typer.main import get_command

from app.defaults import defaults_before
from app.fields import CAPTIONS
from patchpar.cli import app
from patchpar.cli.verbs import VERBS
from tests.test_readme import BLOCK, PAGES, REPOSITORY, command_lines, name
from training.scenes import KINDS, TERRAINS

OPENS = re.compile(r"""(?:from_pretrained|embedded_model)\(\s*"(embedded(?:-dit)?)"|(OpenAI)\(""")
BODY = re.compile(r"-d '(\{.*?\})'")
SCENE = re.compile(rf"\b({'|'.join((*KINDS, *TERRAINS))})\b")
GENERATING = ("generate", "compare", "bench")
STEPS, MIN_STEPS, SIDE = 20, 8, 256  # of the embedded models: the page has no image with fewer steps
NUMBERS = {"num_inference_steps": "steps", "height": "height", "width": "width", "guidance_scale": "guidance"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedPrompt:
    """A prompt and where it is given. None: the pipeline's own value. Without a seed of its own it has 0."""

    source: str
    prompt: str
    model: str = "embedded"
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    has_structure: bool = False

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of the pipeline's call, by which the image is judged.

        An example of something else than its image, smaller than the model's own size or with fewer steps than an
        image takes, has a prompt that works where it is generated as usual.
        """
        usual = {"height": None, "width": None, "steps": STEPS}
        is_short = (self.steps or STEPS) < MIN_STEPS or min(self.height or SIDE, self.width or SIDE) < SIDE
        settings = replace(self, **usual) if is_short and not self.has_structure else self
        own = {name: getattr(settings, field) for name, field in NUMBERS.items()}
        return {"prompt": self.prompt, **{name: value for name, value in own.items() if value is not None}}


def distinct_prompts() -> list[DocumentedPrompt]:
    """One of those that are given several times with the same settings."""
    found: dict[tuple[Any, ...], DocumentedPrompt] = {}
    for each in documented_prompts():
        found.setdefault((each.model, tuple(each.call.items()), each.seed, each.has_structure), each)
    return list(found.values())


def documented_prompts() -> Iterator[DocumentedPrompt]:
    """All of them."""
    makefile = (REPOSITORY / "Makefile").read_text()
    (demo,) = re.findall(r"^PROMPT \?= (.+)$", makefile, re.MULTILINE)
    yield DocumentedPrompt(source="Makefile", prompt=demo)
    for page in PAGES:
        for line in command_lines(page):
            yield from _of_command(line, name(page))
        for block in BLOCK.finditer(page.read_text()):
            yield from _of_code(block["text"], name(page))
            yield from _of_requests(block["text"], name(page))
    yield from _of_help()
    defaults = defaults_before("embedded")
    for caption in CAPTIONS:
        settings: Any = {"height": defaults.height, "width": defaults.width, "steps": defaults.steps}
        yield DocumentedPrompt(source="app", prompt=caption, guidance=defaults.guidance, **settings)
    for recipe in sorted((REPOSITORY / "pipelines").glob("*.py")):
        yield from _of_code(recipe.read_text(), name(recipe))
    for notebook in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        yield from _of_code(_code_of(notebook), name(notebook))


def _of_help() -> Iterator[DocumentedPrompt]:
    group = get_command(app)
    assert group.epilog is not None
    for line in (group.epilog.removeprefix("Try: "), *(f"patchpar {verb} {VERBS[verb].example}" for verb in VERBS)):
        yield from _of_command(line, "--help")


def _of_command(line: str, source: str) -> Iterator[DocumentedPrompt]:
    verb, *words = shlex.split(line, comments=True)[1:]
    if verb not in GENERATING:
        return
    flags = get_command(app).commands[verb].make_context(verb, words).params  # type: ignore[attr-defined]
    if flags["model"] != "embedded":
        return
    steps = flags["steps"]
    for prompt in flags["prompt"] or ():
        yield DocumentedPrompt(
            source=source,
            prompt=prompt,
            height=flags["height"],
            width=flags["width"],
            steps=steps[0] if isinstance(steps, (list, tuple)) and steps else steps or None,
            guidance=flags["guidance_scale"],
            seed=flags["seed"],
        )


def _of_requests(text: str, source: str) -> Iterator[DocumentedPrompt]:
    """Bodies of requests to a server of the embedded model."""
    for body in map(json.loads, BODY.findall(text.replace("\\\n", ""))):
        if "prompt" in body:
            width, height = map(int, body["size"].split("x"))
            yield DocumentedPrompt(
                source=source,
                prompt=body["prompt"],
                height=height,
                width=width,
                steps=body["num_inference_steps"],
                seed=body["seed"],
            )


def _of_code(text: str, source: str) -> Iterator[DocumentedPrompt]:
    """Texts with a word of a scene in Python that opens an embedded model, with the numbers beside them."""
    opened = OPENS.search(text)
    if opened is None or "ImageStreamingPipeline" in text:
        return
    tree = ast.parse(text)
    numbers = dict(_numbers_of(tree))
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and " " in node.value and SCENE.search(node.value) and not _is_docstring(tree, node):  # type: ignore[attr-defined]
            yield DocumentedPrompt(
                source=source,
                prompt=node.value,  # type: ignore[attr-defined]
                model=opened[1] or "embedded",
                has_structure="StructureGuidance()" in text,
                **numbers,
            )


def _numbers_of(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Settings of calls: of keywords, of dictionaries, and of constants that a name stands for."""
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        for key, each in _pairs_of(node):
            value = getattr(constants.get(getattr(each, "id", None), each), "value", None)  # type: ignore[arg-type]
            if key in NUMBERS and value is not None:
                yield NUMBERS[key], value
            if key == "seed":
                yield "seed", value
            if key == "size" and isinstance(value, str):
                yield from zip(("width", "height"), map(int, value.split("x")), strict=True)


def _pairs_of(node: ast.AST) -> list[tuple[Any, ast.AST]]:
    """Names and values of a call or a dictionary."""
    if isinstance(node, ast.Dict):
        return [(getattr(key, "value", None), each) for key, each in zip(node.keys, node.values, strict=True)]
    if not isinstance(node, ast.Call):
        return []
    seeds = [("seed", node.args[0])] if getattr(node.func, "attr", "") == "manual_seed" else []
    return [*seeds, *((each.arg, each.value) for each in node.keywords)]


def _is_docstring(tree: ast.Module, node: ast.AST) -> bool:
    holders = [each for each in ast.walk(tree) if isinstance(each, (ast.Module, ast.FunctionDef, ast.ClassDef))]
    return any(isinstance(first := each.body[0], ast.Expr) and first.value is node for each in holders if each.body)


def _code_of(notebook: Path) -> str:
    found = json.loads(notebook.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in found if cell["cell_type"] == "code")
