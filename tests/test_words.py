"""Pages, help, docstrings and messages use the words that people search for: image, video, audio, generate.

A word that patchpar used before is refused wherever prose is read, so that it cannot come back. Code in pages is not
prose: names of an interface are checked where they are defined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from patchpar.cli import app
from tests.sources import tokens_of

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
PAGES = sorted(
    {
        *(
            REPOSITORY / name
            for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "mkdocs.yml", "app/README.md")
        ),
        *DOCS.rglob("*.md"),
        *(REPOSITORY / "pipelines").glob("*.md"),
        REPOSITORY / "integrations/comfyui/README.md",
    }
)
SOURCES = sorted(path for folder in ("patchpar", "app") for path in (REPOSITORY / folder).rglob("*.py"))
INSTEAD = {
    r"pictures?": "image",
    r"films?": "video",
    r"footage": "video",
    r"sounds?": "audio",
    r"ears?": "audio",
    r"draw(s|n|ing)?|drew": "generate, sample",
    r"door": "communicator",
    r"seam": "exchange point",
    r"promises?": "guarantee",
    r"crew": "worker group",
    r"treatments?": "exchange policy",
    r"summands?": "shift",
    r"led on|lead on|leads on": "extrapolate",
    r"disturb(s|ed|ing)?": "perturb",
    r"self-check": "verification",
    r"verdicts?": "verification result",
    r"places? of a rank": "group rank",
    r"rooms": "subpackage",
}
"""What is refused, and what to write."""
ANY_OF_THEM = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)
ALLOWED = (
    r"visible seams?|seam, z",  # in an image
    r"T5FilmDecoder \| film",  # feature-wise linear modulation
)
"""Where a refused word is the right one."""
CODE = re.compile(
    r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|\{[^}\n]*\}|^[ -]*[^:\n]*: [\w/-]+\.md$", re.MULTILINE | re.DOTALL
)
SEARCHED = (
    *("multi-GPU", "multi-node", "torchrun", "accelerate launch", "Slurm", "Docker", "Kubernetes", "NVLink"),
    *(f"{kind} parallelism" for kind in ("sequence", "context", "data", "tensor", "pipeline", "patch")),
    *("latency", "throughput", "quantization", "out of memory", "VRAM", "FSDP", "offloading", "device_map"),
    *("xDiT", "DistriFusion", "PipeFusion", "Ulysses", "ring attention", "AsyncDiff", "TeaCache"),
    *("use_cfg_parallel", "ulysses_degree", "ring_degree", "pipefusion_parallel_degree", "data_parallel_degree"),
    *("use_parallel_vae", "warmup_steps", "split_scheme", "sync_mode", "no_split_batch", "split_between_processes"),
)
"""What people with GPUs search for."""
VERBS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def prose(page: Path) -> str:
    """What a reader reads: without code, targets of links and file names of the menu."""
    text = page.read_text()
    if page.suffix == ".yml":
        return "\n".join(re.findall(r"- ([^:\n]+):", text))
    return CODE.sub(" ", text)


def refused(text: str) -> list[str]:
    """Words of a text that have another one, each with what to write instead."""
    for words in ALLOWED:
        text = re.sub(words, " ", text, flags=re.IGNORECASE)
    if ANY_OF_THEM.search(text) is None:  # in a sixth of the time, and true of all but a few texts
        return []
    return [
        f"{found[0]!r}: write {word!r}"
        for pattern, word in INSTEAD.items()
        for found in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_uses_the_words_of_the_field(page: Path) -> None:
    assert refused(prose(page)) == []


def test_words_that_people_search_for_are_on_a_page() -> None:
    """On one that says how to do something: not in the changelog, a table of figures or a decision."""
    pages = [page for page in PAGES if not {"figures", "decisions"} & set(page.parts) and page.stem != "CHANGELOG"]
    text = "\n".join(page.read_text() for page in pages).lower()
    assert [word for word in SEARCHED if word.lower() not in text] == []


def prose_of_code(source: str) -> Iterator[str]:
    """What a reader of a source reads, and who runs it: docstrings, comments, and texts of errors, help and pages."""
    for token in tokens_of(source, "text", "comment"):
        yield CODE.sub(" ", token.text)


def test_docstrings_comments_and_messages_use_the_words_of_the_field() -> None:
    found = {str(path.relative_to(REPOSITORY)): refused("\n".join(prose_of_code(path.read_text()))) for path in SOURCES}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("source", ["x = f'the {x} picture'", "# is drawn", 'def f():\n    """Of a promise."""\n'])
def test_a_planted_word_is_found_in_code(source: str) -> None:
    assert len(refused("\n".join(prose_of_code(source)))) == 1


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_uses_the_words_of_the_field(verb: str) -> None:
    found = CliRunner().invoke(app, [*filter(None, [verb]), "--help"])
    assert found.exit_code == 0
    assert refused(found.output) == []


def test_pages_are_named_by_the_words_of_the_field() -> None:
    assert refused(" ".join(page.stem.replace("-", " ") for page in PAGES)) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("The picture is the same.", "picture"),
        ("Pictures of ranks", "Pictures"),
        ("a film\nwith audio", "film"),
        ("it is drawn again", "drawn"),
        ("the edge is a seam between ranks", "seam"),
        ("[two pictures](docs/stream.md)", "pictures"),
    ],
)
def test_a_planted_word_is_found(text: str, word: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert [found.partition(":")[0] for found in refused(prose(page))] == [repr(word)]


def test_a_word_in_its_right_sense_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("No visible seam.\n\n```python\npicture = draw()\n```\n\n`/film`, [images](figures/pictures.md)\n")
    assert refused(prose(page)) == []
