"""The GPUs of this machine, and a Python whose torch can use them. Uses the standard library only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "2.13.0"
HAS_CUDA = "import torch, diffusers, pytest, sys; sys.exit(not torch.cuda.is_available())"
HAS_PACKAGES = "import torch, diffusers, pytest"


def cards() -> list[str]:
    """Return a line for each NVIDIA GPU, as `nvidia-smi -L` names it; none without a GPU or driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.startswith("GPU ")]


def python_with(device: str, venv: Path, root: Path) -> str:
    """Return the Python to run parts with: this one if its torch can use `device`, else one of `venv`, made if needed.

    Raises RuntimeError if the torch installed there cannot use the GPU either; on a CPU nothing is installed.
    """
    needed = HAS_CUDA if device == "cuda" else HAS_PACKAGES
    if _succeeds(sys.executable, needed):
        return sys.executable
    if device == "cpu":
        raise RuntimeError("torch, diffusers or pytest is missing: make .venv/installed-dev, and use .venv/bin/python")
    python = str(venv / "bin" / "python")
    if not _succeeds(python, needed):
        _install(venv, python, root)
    if not _succeeds(python, needed):
        raise RuntimeError(f"torch {TORCH} in {venv} cannot use the {device} here: is the driver too old for its CUDA?")
    return python


def version_of(root: Path) -> str:
    """Return the hash of the package as it is committed; empty outside a repository or without git."""
    return _answer_of_git(root, "rev-parse", "HEAD:patchpar")


def commit_of(root: Path) -> str:
    """Return the hash, in short, of the commit that is checked out; empty outside a repository."""
    return _answer_of_git(root, "rev-parse", "--short=8", "HEAD")


def _answer_of_git(root: Path, *arguments: str) -> str:
    if shutil.which("git") is None:
        return ""
    answer = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def _install(venv: Path, python: str, root: Path) -> None:
    """Make an environment. The build of torch on PyPI for Linux is the one with CUDA."""
    print(f"Installing torch {TORCH} with CUDA into {venv}: some minutes and 5 GB, the first time only.", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, f"torch=={TORCH}"], check=True)
    subprocess.run([*pip, "--editable", ".[dev]"], check=True, cwd=root)


def _succeeds(python: str, code: str) -> bool:
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", code], capture_output=True, timeout=300, check=False).returncode == 0
