"""The wheel has all that a user needs and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent


def test_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"patchpar"}
    plan = "patchpar/token_split/plans/FluxTransformer2DModel.json"
    assert {"patchpar/py.typed", "patchpar/cli/__init__.py", plan} <= names
    assert {"patchpar/app/page.py", "patchpar/app/style.css", "patchpar/live/watch.html"} <= names
    for model, denoiser in (("scenes-unet", "unet"), ("scenes-dit", "transformer"), ("face-stream", "transformer")):
        assert f"patchpar/assets/{model}/model_index.json" in names
        assert f"patchpar/assets/{model}/{denoiser}/diffusion_pytorch_model.fp16.safetensors" in names
    assert "patchpar/assets/face-stream/speech.wav" in names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".ckpt", ".pyc"))]
    assert wheel.stat().st_size < 48 * 2**20
