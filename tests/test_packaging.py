"""The wheel has all that a user needs and nothing else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "patchpar"
WITH_TORCH_FOR_GPUS = {"triton"}
OF_EXTRAS = {
    "launch/ray/cluster.py": {"ray"},
    "launch/ray/ray_rank.py": {"ray"},
    "pipeline/adapter_selection.py": {"peft"},
    "serving/admin_bodies.py": {"pydantic"},
    "web/http_page.py": {"fastapi", "starlette"},
    "web/port_protocol.py": {"h11", "uvicorn"},
    "web/server.py": {"uvicorn"},
    "web/webrtc.py": {"aiortc"},
    "serving/image_request.py": {"pydantic"},
    "serving/pipeline_fields.py": {"pydantic"},
    "serving/video_request.py": {"pydantic"},
    "serving/metrics.py": {"prometheus_client"},
    "serving/server.py": {"fastapi"},
    "serving/streams/stream_request.py": {"pydantic"},
    "serving/http/streams.py": {"fastapi"},
    "serving/http/stream_socket.py": {"fastapi", "starlette"},
    "serving/http/access.py": {"fastapi", "starlette"},
    "serving/http/admin.py": {"fastapi"},
    "serving/http/application.py": {"fastapi", "starlette"},
    "serving/http/event_stream.py": {"starlette"},
    "serving/http/files.py": {"fastapi"},
    "serving/http/image_socket.py": {"fastapi", "starlette"},
    "serving/http/images.py": {"fastapi"},
    "serving/http/job_outcome.py": {"fastapi", "starlette"},
    "serving/http/jobs.py": {"fastapi"},
    "serving/http/request_body.py": {"fastapi", "starlette"},
    "serving/http/video_view.py": {"fastapi"},
    "serving/http/videos.py": {"fastapi"},
}  # asked for before they are imported, see WebPage in web/viewer.py and cli/serve.py
MODULE_OF = {"pillow": "PIL", "huggingface-hub": "huggingface_hub"}


def imported_by(path: Path) -> Iterator[str]:
    """Packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        facts = Parser().parsestr(archive.read(metadata).decode())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"patchpar"}
    plan = "patchpar/shard/transformer/plans/FluxTransformer2DModel.json"
    assert {"patchpar/py.typed", "patchpar/cli/__init__.py", plan} <= names
    assert {"patchpar/app/page.py", "patchpar/app/style.css", "patchpar/web/watch.html"} <= names
    for model, denoiser in (("scenes-unet", "unet"), ("scenes-dit", "transformer"), ("face-stream", "transformer")):
        assert f"patchpar/assets/{model}/model_index.json" in names
        assert f"patchpar/assets/{model}/{denoiser}/diffusion_pytorch_model.fp16.safetensors" in names
    assert "patchpar/assets/face-stream/speech.wav" in names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".ckpt", ".pyc"))]
    assert wheel.stat().st_size < 48 * 2**20
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert [facts["Author"], facts["Version"]] == [citation["authors"][0]["name"], citation["version"]]
    assert_a_plain_install_has_what_is_imported([Requirement(need) for need in facts.get_all("Requires-Dist") or []])


def assert_a_plain_install_has_what_is_imported(needs: list[Requirement]) -> None:
    """Streams and videos are written without an extra, as images are."""
    there = {MODULE_OF.get(need.name, need.name) for need in needs if need.marker is None}
    assert {"av", "PIL", "torch"} <= there
    known = there | set(sys.stdlib_module_names) | {"patchpar"}
    for path in PACKAGE.rglob("*.py"):
        own = OF_EXTRAS.get(str(path.relative_to(PACKAGE)), set())
        for_gpus = path.parent.name == "programs" or path == PACKAGE / "cli" / "gpu_facts.py"
        own = own | (WITH_TORCH_FOR_GPUS if for_gpus else set())
        assert set(imported_by(path)) - known <= own, path


def test_extras_can_be_had_on_the_oldest_python() -> None:
    """aiortc 1.15 is the last for Python 3.10, 1.14 the first that takes the oldest PyAV that is allowed, 15."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in text
    asked = [Requirement(each) for each in re.findall(r'"(aiortc[^"]*)"', text) if each != "aiortc.*"]
    assert len(asked) == 2
    assert all("1.15.0" in each.specifier and "1.13.0" not in each.specifier for each in asked)


@pytest.mark.parametrize(
    ("package", "times", "version"),
    [
        ("starlette", 2, "0.43.0"),  # its parser of forms takes no max_part_size
        ("pillow", 3, "10.0.1"),  # its images have no has_transparency_data
        ("openai", 1, "2.1.0"),  # its client has no videos
    ],
)
def test_versions_that_lack_what_is_used_are_not_allowed(package: str, times: int, version: str) -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    asked = re.findall(rf'"({package}\b[^"]*)"', text)
    assert len(asked) == times
    assert all(version not in Requirement(each).specifier for each in asked)


def test_versions_on_the_page_are_those_that_are_allowed() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    needs = map(Requirement, re.findall(r'^  "(.+)",$', text.partition("\ndependencies")[2], re.MULTILINE))
    allowed = {each.name: each.specifier for each in needs}
    page = (REPOSITORY / "docs" / "installation.md").read_text()
    first, last = re.findall(r"diffusers 0\.(\d+) to 0\.(\d+)", page)[0]
    assert Requirement(f"diffusers>=0.{first},<0.{int(last) + 1}").specifier == allowed["diffusers"]
    assert Requirement("transformers>=5.0,<6").specifier == allowed["transformers"]
    assert "transformers 5 (below 5.24 with LoRA)" in page
    assert '"transformers<5.24"' in text
    assert f"torch {str(allowed['torch']).removeprefix('>=')} or newer" in page
