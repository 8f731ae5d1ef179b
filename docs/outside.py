"""What the site takes from outside docs/: images, recipes, how to contribute. A hook of mkdocs, see mkdocs.yml.

Pages link to one another as they lie in the repository, so that they can be read there too. Here every such link is
led to where the site has its target: `docs/plan.md` is `plan.md`, a recipe `pipelines/flux.py` is the page
`pipelines/flux.md`, and everything else keeps its path.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
AS_THEY_ARE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "pipelines/README.md",
    "integrations/comfyui/README.md",
    "notebooks/*.ipynb",
    "assets/figures/*.*",
    "assets/figures/error-maps/*.*",
    "assets/figures/error-maps/*/*.*",
)
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?=[)#])")
FENCE = re.compile(r"^```(?P<language>\w+) [^\n]*$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies elsewhere."""
    from mkdocs.structure.files import File

    for path in sorted(found for pattern in AS_THEY_ARE for found in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path in sorted((ROOT / "pipelines").glob("*.py")):
        page = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
        files.append(File.generated(config, site_path(path.relative_to(ROOT).as_posix()), content=page))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links led on, and without the notes to tests that stand beside a block's language."""
    here = page.file.src_uri
    return FENCE.sub(r"```\g<language>", LINK.sub(lambda match: led(match["target"], here, files), markdown))


def led(target: str, here: str, files: Files) -> str:
    """Where a link of the page `here` leads on the site. What is not on the site stays, for mkdocs to complain of."""
    outside = files.src_uris[here].generated_by is not None
    in_repository = normpath(join(dirname(here if outside else f"docs/{here}"), target))
    wanted = site_path(in_repository)
    return relpath(wanted, dirname(here) or ".") if wanted in files.src_uris else target


def site_path(in_repository: str) -> str:
    """Where the site has a file of the repository."""
    if in_repository.startswith("pipelines/") and in_repository.endswith(".py"):
        return in_repository.removesuffix(".py") + ".md"
    return in_repository.removeprefix("docs/")
