"""The GPUs of this machine, and a Python whose torch can use them. Uses the standard library only."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "2.13.0"
HAS_CUDA = "import torch, diffusers, pytest, sys; sys.exit(not torch.cuda.is_available())"
HAS_PACKAGES = "import torch, diffusers, pytest"
FACTS = "import torch; print(f'torch {torch.__version__} with {torch.cuda.device_count()} GPUs')"
SOURCES = ("patchpar", "benchmarks", "tests")


def cards() -> list[str]:
    """Return a line for each NVIDIA GPU, as `nvidia-smi -L` names it; none without a GPU or driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    answer = _answer(["nvidia-smi", "-L"], seconds=60)
    return [line.strip() for line in answer.splitlines() if line.startswith("GPU ")]


def python_with(device: str, venv: Path, root: Path) -> str:
    """Return the Python to run parts with: this one if its torch can use `device`, else one of `venv`, made if needed.

    Raises RuntimeError if nothing can be installed, or it cannot use the GPU either. On a CPU nothing is installed.
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
        raise RuntimeError(
            f"torch {TORCH} in {venv} cannot use the GPU here: if the driver is too old for its CUDA, install an older "
            "torch and this package into an environment of your own, and use --venv for it"
        )
    return python


def torch_of(python: str) -> str:
    """Return the version of its torch, and how many GPUs that sees: CUDA_VISIBLE_DEVICES may leave some out."""
    return _answer([python, "-c", FACTS], seconds=300).strip()


def sources_of(root: Path) -> str:
    """Return a hash of the sources as they are in the folder, whether committed or not."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in SOURCES for file in (root / folder).rglob("*") if file.is_file()):
        if file.suffix != ".pyc":
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def commit_of(root: Path) -> str:
    """Return the hash, in short, of the commit that is checked out; empty outside a repository.

    With "and changes" behind it where the sources are not what the commit has.
    """
    git = ["git", "-C", str(root)]
    commit = _answer([*git, "rev-parse", "--short=8", "HEAD"], seconds=60).strip()
    changes = _answer([*git, "status", "--porcelain", "--", *SOURCES], seconds=60).strip()
    return f"{commit} and changes" if commit and changes else commit


def _answer(command: list[str], *, seconds: float) -> str:
    """Return what a command prints; empty where it is not installed, fails, or takes longer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _install(venv: Path, python: str, root: Path) -> None:
    """Make an environment, or go on with one. The build of torch on PyPI for Linux is the one with CUDA.

    Raises RuntimeError if it cannot be made.
    """
    print(f"Installing torch {TORCH} with CUDA into {venv}: some minutes and 5 GB, the first time only.", flush=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([*pip, f"torch=={TORCH}"], check=True)
        subprocess.run([*pip, "--editable", ".[dev]"], check=True, cwd=root)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            f"torch {TORCH} with CUDA could not be installed into {venv}: the same command tries again ({error})"
        ) from error


def _succeeds(python: str, code: str) -> bool:
    try:
        return subprocess.run([python, "-c", code], capture_output=True, timeout=300, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
