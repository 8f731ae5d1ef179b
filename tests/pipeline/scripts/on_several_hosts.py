"""Run by torchrun: under_torchrun.py by ranks that each believe to be alone on their host, which share a secret."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from patchpar.launch import authentication

os.environ["LOCAL_WORLD_SIZE"] = "1"
authentication.this_host = lambda: f"host {os.environ['RANK']}"
runpy.run_path(str(Path(__file__).with_name("under_torchrun.py")), run_name="__main__")
