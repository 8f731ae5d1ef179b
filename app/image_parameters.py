"""Parameters of an image, kept in its PNG file as other programs keep them.

    a red house at night
    Negative prompt: blurred
    Steps: 20, CFG scale: 4, Seed: 7, Size: 256x256, Model: embedded, Plan: "cfg=2,patch=2", Version: patchpar

This is the text chunk `parameters` of AUTOMATIC1111's web UI, which ComfyUI imports as well. The line of the negative
prompt is there without one too: for ComfyUI it is the end of the prompt.

The web UI has its LoRAs in the prompt, as <lora:ink:0.8>, which diffusers would read as words. Images of ComfyUI have
their graph instead, which `comfyui_graph` reads.
"""

import json
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from patchpar import PlanError

from . import loras
from .comfyui_graph import ComfyGraph
from .limits import FILE, check_size
from .requests import GenerateRequest

CHUNK = "parameters"
LORAS = "LoRA"
NEGATIVE = "\nNegative prompt:"
SETTINGS = "\nSteps: "
SETTING = re.compile(r'(?:\A|(?<=,))([^:,]+):\s*("(?:[^"\\]|\\.)*"|[^,]*)(?:,|$)')  # in linear time
WHOLE = re.compile(r"-?[0-9]{1,20}")
SIZE = re.compile(r"(\d{1,9})\s*x\s*(\d{1,9})")
TAG = re.compile(r"<lora:([^:<>]+):?([^:<>]*)[^<>]*>")  # in linear time
GRAPH, WORKFLOW = "prompt", "workflow"  # chunks of ComfyUI: what was run, and what its page shows
OWN = ("Version", "patchpar")
NAMES = {"Steps": "steps", "CFG scale": "guidance", "Seed": "seed"}
MAX_TEXT = 64 * 1024  # characters; nodes of other programs take more, and are in chunks of their own
MAX_GRAPH = 2**20  # characters; as JSON each may be a list, of 64 bytes


def text_of(request: GenerateRequest, facts: Mapping[str, str]) -> str:
    """The parameters of a request as text. `facts`: further names and values, such as the model."""
    settings = {
        "Steps": str(request.steps),
        "CFG scale": f"{request.guidance:g}",
        "Seed": str(request.seed),
        "Size": f"{request.width}x{request.height}",
        **({LORAS: loras.text_of(request.loras)} if request.loras else {}),
        **facts,
    }
    line = ", ".join(f"{name}: {_quoted(value)}" for name, value in settings.items())
    negative = request.negative.replace(NEGATIVE, f" {NEGATIVE.strip()}")  # so that the last such line is its begin
    return f"{request.prompt}{NEGATIVE} {negative}\n{line}"


def add_parameters(image: Any, request: GenerateRequest, facts: Mapping[str, str]) -> Any:
    """Add the parameters to a PIL image, which is saved with them as PNG. Returns the image."""
    image.info[CHUNK] = text_of(request, facts)
    return image


def read_parameters(path: str | Path | None) -> GenerateRequest:
    """The request that an image was made by. What the file does not say has its default.

    Raises PlanError for a file that is no PNG image, has no parameters, or has some that no request can have.
    """
    if path is None:
        raise PlanError("there is no image: choose a PNG file that was generated here or by another program")
    check_size(path)
    found = _found_in(path)
    return GenerateRequest.of(**found.arguments()) if isinstance(found, ComfyGraph) else request_of(found)


def request_of(text: str) -> GenerateRequest:
    """The request that such a text describes. Raises PlanError."""
    written, has_settings, line = text.rpartition(SETTINGS)
    if not has_settings:
        raise PlanError(f"{FILE} has parameters without steps, so not those of one image: {text[:80]!r}")
    settings = _settings_in(SETTINGS + line)
    is_own = OWN in settings.items()
    begin = written.rfind(NEGATIVE) if is_own else written.find(NEGATIVE)  # of several the web UI reads the first
    prompt, negative = (written[:begin], written[begin + len(NEGATIVE) :]) if begin >= 0 else (written, "")
    if not is_own:
        prompt = TAG.sub("", prompt).strip()
    return GenerateRequest.of(prompt=prompt, negative=negative.strip(), **_arguments(settings))


def loras_in(path: str | Path) -> str:
    """Names and weights of the LoRAs that an image was made with, which a file has without their paths; or empty.

    Raises PlanError, as `read_parameters` does.
    """
    found = _found_in(path)
    if isinstance(found, ComfyGraph):
        return found.loras()
    prompt, _, line = found.rpartition(SETTINGS)
    settings = _settings_in(SETTINGS + line)
    if OWN not in settings.items():
        return ", ".join(f"{name.strip()}:{weight or 1}" for name, weight in TAG.findall(prompt))
    named = settings.get(LORAS, "")
    return str(json.loads(named)) if named.startswith('"') else named


def _settings_in(line: str) -> dict[str, str]:
    """Names and values in the line of settings."""
    return {name.strip(): value.strip() for name, value in SETTING.findall(line)}


def _arguments(found: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a request in the settings. Raises PlanError for a number that is none."""
    arguments = {own: _number(name, found[name]) for name, own in NAMES.items() if name in found}
    if "Size" in found:
        size = SIZE.fullmatch(found["Size"])
        if size is None:
            raise PlanError(f"{FILE} gives the size {found['Size']!r:.40}: width and height are written as 512x768")
        arguments |= {"width": int(size[1]), "height": int(size[2])}
    return arguments


def _number(name: str, text: str) -> float:
    try:
        return int(text) if WHOLE.fullmatch(text) else float(text)  # seeds of others have up to 20 digits
    except ValueError as error:
        raise PlanError(f"{FILE} gives {name} as {text!r}, which is no number") from error


def _found_in(path: str | Path) -> str | ComfyGraph:
    """The text chunk of a PNG file, or its graph; pixels are not decoded. Raises PlanError."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            text, graph, workflow = (image.info.get(name) for name in (CHUNK, GRAPH, WORKFLOW))
    except (OSError, ValueError, SyntaxError, struct.error, zlib.error, Image.DecompressionBombError) as error:
        raise PlanError(f"{FILE} cannot be read as a PNG image, which is where parameters are kept") from error
    if not isinstance(text, str) and isinstance(graph, str):
        if len(graph) > MAX_GRAPH:
            raise PlanError(f"{FILE} has a graph of {len(graph)} characters: at most {MAX_GRAPH} are read")
        return ComfyGraph.read(graph)
    if not isinstance(text, str) and workflow is not None:
        raise PlanError(f"{FILE} has a workflow of ComfyUI that was not run: generate there, and drop that image")
    if not isinstance(text, str):
        raise PlanError(f"{FILE} has no parameters: it was not generated here, or was saved without them")
    if len(text) > MAX_TEXT:
        raise PlanError(f"{FILE} has {len(text)} characters of parameters: at most {MAX_TEXT} are read")
    return text


def _quoted(value: str) -> str:
    """In quotes where a value has what separates them."""
    return json.dumps(value, ensure_ascii=False) if any(sign in value for sign in ',:"\n') else value
