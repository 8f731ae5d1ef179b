"""An image says how it was made, to this page and to other programs, and sets the fields of the page."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from PIL import Image, PngImagePlugin

from app.image_parameters import add_parameters, loras_in, read_parameters, request_of, text_of
from app.requests import GenerateRequest
from patchpar import PlanError

REQUEST = GenerateRequest(
    prompt="a red house, at night",
    negative="blurred, dark",
    width=384,
    height=256,
    steps=12,
    guidance=3.5,
    seed=2**53 - 1,
)
FACTS = {"Model": "embedded", "Plan": "cfg=2,patch=2,strategy=exact", "Version": "patchpar"}


def png(path: Path, text: str | None, chunk: str = "parameters", **options: Any) -> Path:
    info = PngImagePlugin.PngInfo()
    if text is not None:
        info.add_text(chunk, text, **options)
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)
    return path


def as_a1111_reads(text: str) -> dict[str, str]:
    """By the documented form: lines of the prompt, of the negative prompt, and last one line of `name: value`."""
    *lines, last = text.strip().split("\n")
    pairs = re.findall(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)', last)
    assert len(pairs) >= 3, "fewer are taken for a part of the prompt"
    cut = next((number for number, line in enumerate(lines) if line.startswith("Negative prompt:")), len(lines))
    negative = "\n".join(lines[cut:]).removeprefix("Negative prompt:").strip()
    return {"Prompt": "\n".join(lines[:cut]), "Negative prompt": negative, **dict(pairs)}


def as_comfyui_reads(text: str) -> dict[str, str]:
    """It takes what stands before the last line of the negative prompt, and nothing without one."""
    end = text.rindex("\nSteps:")
    middle = text.rindex("\nNegative prompt:", 0, end)
    line = text[end:].split("\n")[1]
    pairs = re.findall(r'\s*([^:]+):\s*([^"{].*?|".*?"|\{.*?\})\s*(?:,|$)', line)
    return {"Prompt": text[:middle], "Negative prompt": text[middle + 18 : end].strip(), **dict(pairs)}


@pytest.mark.parametrize("reads", [as_a1111_reads, as_comfyui_reads])
@pytest.mark.parametrize("negative", ["blurred, dark", ""])
def test_other_programs_read_them(reads: Any, negative: str) -> None:
    request = GenerateRequest(prompt=REQUEST.prompt, negative=negative, width=384, steps=12, guidance=3.5, seed=7)
    found = reads(text_of(request, FACTS))
    assert (found["Prompt"], found["Negative prompt"]) == (REQUEST.prompt, negative)
    assert (found["Steps"], found["CFG scale"], found["Seed"]) == ("12", "3.5", "7")
    assert found["Size"] == "384x256", "width first"
    assert found["Plan"].strip('"') == FACTS["Plan"]
    assert found["Version"] == "patchpar"


def test_the_image_that_the_page_shows_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gradio writes the file, and as it is downloaded."""
    component = gr.Image(format="png", interactive=False)
    monkeypatch.setattr(component, "GRADIO_CACHE", str(tmp_path))
    displayed = component.postprocess(add_parameters(Image.new("RGB", (8, 8)), REQUEST, FACTS))
    assert read_parameters(displayed.path) == REQUEST


def test_those_of_other_programs_are_read(tmp_path: Path) -> None:
    text = (
        "a cat,\non a mat\nSteps: 30, Sampler: Euler a, Schedule type: Karras, CFG scale: 7, Seed: 12, "
        'Size: 512x768, Model hash: 6ce0161689, Lora hashes: "x: 1, y: 2", Version: v1.9.4'
    )
    for number, options in enumerate(({}, {"zip": True})):
        request = read_parameters(png(tmp_path / f"{number}.png", text, **options))
        assert (request.prompt, request.negative) == ("a cat,\non a mat", "")
        assert (request.width, request.height, request.steps, request.guidance) == (512, 768, 30, 7)
        assert request.seed == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no parameters"),
        ("a cat", "without steps"),
        ("a cat\nSteps: many, Seed: 1", "Steps as 'many', which is no number"),
        ("a cat\nSteps: 20, Size: large", "the size 'large'"),
        ("a cat\nSteps: 2000, Seed: 1", "steps 2000: it is a whole number from 1 to 150"),
        ("a cat\nSteps: 20, Size: 99999x99999", "99999 x 99999 pixels"),
        ("a cat\nSteps: nan", "steps nan"),
        ("\nSteps: 20", "there is no prompt"),
        (
            "a cat\nSteps: 20, Seed: 18446744073709551615",
            "seed 18446744073709551615: it is a whole number",
        ),
        ("a cat\nSteps: 20, Seed: 9007199254740993", "seed 9007199254740993: it is a whole number"),
        ("x" * 70_000 + "\nSteps: 20", "at most 65536"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        read_parameters(png(tmp_path / "a.png", text))


def test_a_line_of_a_prompt_that_looks_like_a_negative_prompt() -> None:
    """The web UI writes and reads the first such line as the negative prompt; here any prompt comes back as it was."""
    theirs = "a cat\nNegative prompt: fog\nNegative prompt: rain\nSteps: 20, Sampler: Euler, Seed: 1"
    found = as_a1111_reads(theirs)
    request = request_of(theirs)
    assert (request.prompt, request.negative) == (found["Prompt"], found["Negative prompt"])
    for prompt, negative in (("a\nNegative prompt: b", "c"), ("a", "b\nNegative prompt: c")):
        own = request_of(text_of(GenerateRequest(prompt=prompt, negative=negative), FACTS))
        assert (own.prompt, own.negative.split()) == (prompt, negative.split())


def test_loras_in_a_prompt_of_the_web_ui_are_named_and_no_words(tmp_path: Path) -> None:
    text = "a cat <lora:ink-v2:0.8>, ink\nNegative prompt: fog\nSteps: 20, Seed: 1"
    path = png(tmp_path / "a.png", f"<lora:wide>{text}, Version: v1.10.1")
    request = read_parameters(path)
    assert (request.prompt, request.negative) == ("a cat , ink", "fog")
    assert loras_in(path) == "wide:1, ink-v2:0.8"
    own = GenerateRequest(prompt="a <lora:ink:1> cat")
    path = png(tmp_path / "b.png", text_of(own, FACTS))
    assert (read_parameters(path), loras_in(path)) == (own, ""), "here they are words"


def test_a_workflow_of_comfyui_that_was_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has a workflow of ComfyUI that was not run: generate there"):
        read_parameters(png(tmp_path / "a.png", "{}", "workflow"))


def test_a_long_line_of_nothing_takes_no_time() -> None:
    """Uploaded by anybody, and read while no other handler runs."""
    began = time.process_time()
    assert request_of(f"a fox\nNegative prompt: \nSteps: 20,{'a' * 60_000}").steps == 20
    with pytest.raises(PlanError, match="the prompt has 59990 characters"):
        request_of(f"{'<lora:a' * 8570}\nSteps: 20")
    assert time.process_time() - began < 0.5
    with pytest.raises(PlanError, match="gives the size '9999"):
        request_of(f"a fox\nNegative prompt: \nSteps: 20, Size: {'9' * 5000}x8")


def test_what_is_no_png_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "JPEG")
    for data in (stream.getvalue(), b"", b"\x89PNG\r\n\x1a\n" + bytes(40)):
        (tmp_path / "a.png").write_bytes(data)
        with pytest.raises(PlanError, match="cannot be read as a PNG image"):
            read_parameters(tmp_path / "a.png")
    with pytest.raises(PlanError, match="choose it again"):
        read_parameters(tmp_path / "gone.png")
    with pytest.raises(PlanError, match="there is no image"):
        read_parameters(None)


def test_a_prompt_that_looks_like_settings_is_a_prompt() -> None:
    request = GenerateRequest(prompt="Steps: 3, Seed: 4", seed=9)
    assert request_of(text_of(request, FACTS)) == request
