"""The task of a pipeline, read from its class before it is loaded: its output, its required input, its defaults.

There is no list of models: the signature of its call gives the inputs, and the fields of its output class give the kind
of output. Both are parsed as text, since importing a pipeline of diffusers takes as long as starting workers.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from patchpar.errors import PlanError
from patchpar.models.files import STREAM_CONFIG, resolve_model
from patchpar.models.hub import fetched, no_folder
from patchpar.models.model_index import INDEX, ModelIndex

Product = Literal["images", "video", "audio", ""]
PRODUCTS: Mapping[str, Product] = {"frames": "video", "images": "images", "image": "images", "audios": "audio"}
BEGINS_WITH = ("image", "video")
NEEDS_ONE = re.compile(
    "Img2Img|ImageToImage|I2I|ImageToVideo|Image2Video|I2V|Inpaint|VideoToVideo|ControlNet|Adapter|Pix2Pix|Upscale"
    "|SuperResolution|Depth2Img|Edit|ImageVariation|Fill|Refiner"
)
"""Classes whose call has a default of None for an image that it requires."""
NEEDS_MASK = re.compile("Inpaint|Fill")
"""Classes whose call has a default of None for a mask that it requires."""
NEEDED_ALWAYS = ("control_image", "conditioning_frames")
"""Required by every call that has them, whose default is None all the same."""
VERBS: Mapping[str, str] = {"images": "generate", "video": "video"}
ANY_PROMPT = "a photo"
"""For calls whose image nobody looks at: trials, warm-up calls, and calls that are recorded without values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTask:
    """A pipeline's class and the signature of its call. `product`: its kind of output, "" if unknown.

    `parameters`: the arguments of its call with their defaults (None if there is none). `begins_with`: the required
    input, "image" or "video"; "" if it needs none. `needs`: what else is required, beside the prompt and a mask.
    """

    pipeline: str
    product: Product = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    begins_with: str = ""
    needs: tuple[str, ...] = ()

    @property
    def needs_mask(self) -> bool:
        """Whether its call needs a mask beside an image."""
        return "mask_image" in self.parameters and bool(NEEDS_MASK.search(self.pipeline))

    @property
    def needed(self) -> tuple[str, ...]:
        """What its call requires beside a prompt."""
        return (*filter(None, [self.begins_with]), *(["mask_image"] if self.needs_mask else []), *self.needs)


@cache
def purpose_of(pipeline: str) -> PipelineTask | None:
    """Return the task of a diffusers pipeline class, by its name; None if diffusers has no such class."""
    found = _declared(pipeline)
    if found is None:
        return None
    file, module, kind = found
    call = next((each for each in kind.body if isinstance(each, ast.FunctionDef) and each.name == "__call__"), None)
    if call is None:
        return PipelineTask(pipeline=pipeline, product=_product_of(module, file))
    parameters, required = _parameters_of(call)
    begins_with = [
        name for name in BEGINS_WITH if name in required or (name in parameters and NEEDS_ONE.search(pipeline))
    ]
    return PipelineTask(
        pipeline=pipeline,
        product=_product_of(module, file),
        parameters=parameters,
        begins_with=begins_with[0] if begins_with else "",
        needs=tuple(
            name
            for name in parameters
            if name in NEEDED_ALWAYS or (name in required and name not in (*BEGINS_WITH, "prompt", "mask_image"))
        ),
    )


def _declared(pipeline: str) -> tuple[Path, ast.Module, ast.ClassDef] | None:
    """Return the file of a class, its syntax tree, and the class in it."""
    folders = [file.parent for file in _pipelines().rglob("*/__init__.py") if f'"{pipeline}"' in _text_of(file)]
    for file in (file for folder in folders for file in sorted(folder.glob("*.py"))):
        kind = _class_in(file, pipeline)
        if kind is not None:
            return file, ast.parse(_text_of(file)), kind
    return None


def diffusers_folder(name: str) -> Path:
    """Return a folder of the installed diffusers, without importing it."""
    package = find_spec("diffusers")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / name


def _pipelines() -> Path:
    return diffusers_folder("pipelines")


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _class_in(file: Path, name: str) -> ast.ClassDef | None:
    text = _text_of(file)
    body = ast.parse(text).body if f"class {name}(" in text else []
    return next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _parameters_of(call: ast.FunctionDef) -> tuple[dict[str, Any], list[str]]:
    """Return (all arguments with their defaults, those without a default)."""
    named = [each.arg for each in (*call.args.posonlyargs, *call.args.args)][1:]
    defaults: list[ast.expr | None] = [*call.args.defaults]
    given = dict(zip(named, [*[None] * (len(named) - len(defaults)), *defaults], strict=False))
    given |= dict(zip([each.arg for each in call.args.kwonlyargs], call.args.kw_defaults, strict=True))
    return {name: _plain(default) for name, default in given.items()}, [name for name in given if given[name] is None]


def _plain(default: ast.expr | None) -> Any:
    """Return a default that is a literal number, string or bool; else None."""
    try:
        value = None if default is None else ast.literal_eval(default)
    except ValueError:
        return None
    return value if isinstance(value, (int, float, str, bool)) else None


def _product_of(module: ast.Module, file: Path) -> Product:
    """Return the kind of output by the fields of the output class that a pipeline's module defines or imports."""
    for node in module.body:
        if isinstance(node, ast.ClassDef) and _is_output(node.name):
            return _made(node)
        for name in (each.name for each in getattr(node, "names", ()) if _is_output(each.name)):
            found = (_class_in(location, name) for location in _output_modules(file))
            kind = next(filter(None, found), None)
            return "" if kind is None else _made(kind)
    return ""


def _is_output(name: str) -> bool:
    return name.endswith("PipelineOutput")


def _output_modules(file: Path) -> list[Path]:
    """Return files that may define the output class of a pipeline in `file`: those beside it, and shared ones."""
    shared = sorted(_pipelines().rglob("pipeline_*output.py"))
    return [*sorted(file.parent.glob("*.py")), *shared, _pipelines() / "pipeline_utils.py"]


def _made(kind: ast.ClassDef) -> Product:
    targets = [each.target for each in kind.body if isinstance(each, ast.AnnAssign)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return next((PRODUCTS[name] for name in names if name in PRODUCTS), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTask:
    """The task requested of a model: the `verb` of the command line and its kind of output.

    `has_image`: whether there is an input image; None if the verb checks that itself. `has_mask`, `has_strength`:
    whether there is one with it. `converts`: a model whose call takes no image is loaded into a pipeline that does.
    `per_prompt`: images per prompt.
    """

    verb: str
    product: Product = "images"
    has_image: bool | None = False
    has_mask: bool = False
    has_strength: bool = False
    converts: bool = False
    per_prompt: int = 1

    def task_for(self, model: str | Path, options: Mapping[str, Any]) -> dict[str, str]:
        """Return the option `task` of from_pretrained with which the call takes the images; empty where it does.

        Raises PlanError for a repository of the hub whose index cannot be read.
        """
        if not (self.has_image and self.converts):
            return {}
        name = _pipeline_of(model, options)
        purpose = None if name is None else purpose_of(name)
        wanted = {"image", *(["mask_image"] if self.has_mask else [])}
        if purpose is None or wanted <= purpose.parameters.keys():
            return {}
        return {"task": "inpainting" if self.has_mask else "image-to-image"}

    def check_model(self, model: str | Path, options: Mapping[str, Any]) -> Path | None:
        """Return the folder of a model that is loaded with `options`; None of one of the hub.

        Raises PlanError if it is no model or, as its folder shows, cannot do this.
        """
        folder = resolve_model(model, options)[2]
        purpose = None if folder is None else purpose_of(folder.pipeline)
        if folder is not None and (folder.path / STREAM_CONFIG).is_file() and purpose and purpose.product == "video":
            raise PlanError("this model generates video block by block, as its stream.json says: use `patchpar stream`")
        self.check(purpose)
        return None if folder is None else folder.path

    def check(self, purpose: PipelineTask | None) -> None:
        """Raise PlanError if a pipeline of task `purpose` cannot do this. None, an unknown task, is accepted."""
        if purpose is None:
            return
        if purpose.product not in ("", self.product):
            raise PlanError(f"this model is a {purpose.pipeline}, which makes {purpose.product}: {_way_of(purpose)}")
        if purpose.needs:
            raise PlanError(
                f"this model is a {purpose.pipeline}, whose call needs {' and '.join(purpose.needs)}, which "
                f"`patchpar {self.verb}` does not pass: call it in Python, or use a pipeline that needs none"
            )
        if purpose.begins_with and self.has_image is False:
            raise PlanError(f"this model is a {purpose.pipeline}, which begins with {self._way_to_begin(purpose)}")
        if self.has_image and purpose.parameters and not self.converts and "image" not in purpose.parameters:
            raise PlanError(f"this model is a {purpose.pipeline}, which takes no image: leave out --image")
        if self.has_image and not self.has_mask and purpose.needs_mask:
            raise PlanError(f"this model is a {purpose.pipeline}, which needs a mask: add --mask FILE")
        if self.per_prompt > 1 and purpose.parameters and "num_images_per_prompt" not in purpose.parameters:
            raise PlanError(
                f"--num-images {self.per_prompt}: this model is a {purpose.pipeline}, which generates one image per "
                "prompt: give the prompt several times"
            )

    def _way_to_begin(self, purpose: PipelineTask) -> str:
        if purpose.begins_with == "video":
            return "a video, which no verb takes: call it in Python, pipe(prompt, video=frames)"
        if self.verb == "video" or self.converts:
            return "an image: add --image FILE"
        return (
            f"an image, which `patchpar {self.verb}` does not take: `patchpar upscale IMAGE` generates an image again, "
            "larger; for anything else call it in Python, pipe(prompt, image=image)"
        )


def _pipeline_of(model: str | Path, options: Mapping[str, Any]) -> str | None:
    """Return the class that a model's index names; None for one that is not of diffusers."""
    folder = resolve_model(model, options)[2]
    if folder is not None:
        return folder.pipeline
    found = ModelIndex.read(fetched(str(model), [INDEX], options, subject=no_folder(str(model)))).pipeline
    return found if isinstance(found, str) else None


def _way_of(purpose: PipelineTask) -> str:
    verb = VERBS.get(purpose.product)
    return f"use `patchpar {verb}`" if verb else "no verb does; call it in Python, through ParallelPipeline"
