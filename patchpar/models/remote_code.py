"""Code that comes with a model is never run: a model that needs it is refused before anything is loaded.

Versions of diffusers differ in their checks before they import a module from a model's folder, and any library named in
an index is imported. So this is checked here for every version: every class must be one of diffusers or transformers,
and no file may be where code of a model would be looked up.
"""

from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.model_index import INDEX, ComponentEntry, ModelIndex
from patchpar.plan.json_files import read_object

LIBRARIES = ("diffusers", "transformers")
CONFIGS = (
    "config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
KERNEL = "attn_implementation"
"""Part of the names under which versions of transformers take a kernel, or one for each configuration in this one."""
OTHER_FILES = "configuration_files"
"""Names files of which transformers reads one instead of this."""
TRUST = "code that comes with a model is not run, unless from_pretrained gets trust_remote_code=True"


def refuse_code(folder: Path, options: Mapping[str, Any], *, besides: Collection[str] = ()) -> None:
    """Raise PlanError for a model folder that would run code other than that of diffusers and transformers.

    `options`: of from_pretrained; components that they name are not loaded from the folder, nor are `besides`. With
    trust_remote_code=True nothing is refused.
    """
    if options.get("trust_remote_code"):
        return
    _refuse(folder, {*options, *besides}, has_own_class=options.get("custom_pipeline") is not None)
    _refuse_connected(folder, is_asked_for=bool(options.get("load_connected_pipeline")))


def _refuse_connected(folder: Path, *, is_asked_for: bool) -> None:
    """Raise PlanError if diffusers would also load the models that the README.md of a pipeline names."""
    pipeline, card = ModelIndex.read(folder).pipeline, folder / "README.md"
    if card.exists() and (is_asked_for or "Combined" in pipeline):
        raise PlanError(
            f"{folder} is a {pipeline}, which also loads what {card} names, from elsewhere: remove that file if all "
            "components are here, or load it with diffusers and pass it to ParallelPipeline(pipe)"
        )


def _refuse(folder: Path, given: Collection[str], *, has_own_class: bool) -> None:
    index = ModelIndex.read(folder)
    if not isinstance(index.pipeline, str) and not has_own_class:
        raise PlanError(f"{index.file} names {'.'.join(index.pipeline)}, a pipeline of its own: {TRUST}")
    if (folder / "None.py").exists():  # diffusers looks for a file of the name of custom_pipeline, also when it is None
        raise PlanError(f"{folder / 'None.py'} would be taken for the code of a pipeline: {TRUST}")
    for part in index.parts:
        if part.name not in given:
            _refuse_part(index.file, folder / part.name, part)


def refuse_code_of_network(folder: Path) -> None:
    """Raise PlanError for code in the folder of a transformers network that is loaded as a fixed class."""
    _refuse_what_is_in(folder, "", is_looked_up=False)


def _refuse_part(file: Path, folder: Path, part: ComponentEntry) -> None:
    named = f"{file} names {part.library}.{part.kind} for {part.name}"
    if (folder / f"{part.library}.py").exists():
        raise PlanError(f"{named}, and {part.name} has a {part.library}.py: {TRUST}")
    if part.library not in LIBRARIES and part.library not in _pipeline_modules():
        raise PlanError(f"{named}, which is neither of diffusers nor of transformers: {TRUST}")
    if (folder / INDEX).exists():  # a pipeline within the pipeline
        _refuse(folder, (), has_own_class=False)
    looked_up = part.kind.startswith("Auto") or part.kind.endswith("Processor")  # other classes are fixed
    _refuse_what_is_in(folder, part.kind, is_looked_up=looked_up)


def _refuse_what_is_in(folder: Path, kind: str, *, is_looked_up: bool) -> None:
    if (folder / "adapter_config.json").exists():
        raise PlanError(f"{folder / 'adapter_config.json'} has {folder.name} loaded from elsewhere: merge it first")
    for config in (folder / name for name in CONFIGS):
        if config.is_file():
            _refuse_config(config, read_object(config), kind, is_looked_up=is_looked_up)


def _refuse_config(file: Path, facts: Mapping[str, Any], kind: str, *, is_looked_up: bool) -> None:
    if is_looked_up and facts.get("auto_map"):
        raise PlanError(f"{file} has an auto_map, that is classes of its own for {kind}: {TRUST}")
    if OTHER_FILES in facts:
        raise PlanError(
            f"{file} has its content loaded from elsewhere, by {OTHER_FILES}: put the right one in its place"
        )
    for kernel in _kernels(facts):
        if "/" in kernel:
            raise PlanError(f"{file} names the attention kernel {kernel!r}, code from the hub: {TRUST}")


def _kernels(facts: Any, is_named: bool = False) -> Iterator[str]:
    """Yield what a configuration, and those nested in it, name as kernels of attention. `is_named`: that `facts` is."""
    if isinstance(facts, str) and is_named:
        yield facts
    if isinstance(facts, Mapping):
        for name, value in facts.items():
            yield from _kernels(value, is_named or KERNEL in name)
    if isinstance(facts, list):
        for value in facts:
            yield from _kernels(value, is_named)


def _pipeline_modules() -> frozenset[str]:
    """Return the modules of diffusers' pipelines: an index names one for a class that only one pipeline has."""
    spec = find_spec("diffusers")
    roots = [Path(root) / "pipelines" for root in (spec and spec.submodule_search_locations) or ()]
    folders = [folder for root in roots for folder in (root, root / "deprecated")]
    return frozenset(init.parent.name for folder in folders for init in folder.glob("*/__init__.py"))
