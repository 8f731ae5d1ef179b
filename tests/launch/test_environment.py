"""Workers start and exchange in containers and sandboxes: no home, no name for the user, no memfd, a long TMPDIR."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Read by every Python that starts with it on its path: a system that refuses memfd_create, and does not know the user.
REFUSES = """
import os, pathlib, pwd, tempfile

def memfd_create(*_):
    pathlib.Path(tempfile.gettempdir(), f"refused-{os.getpid()}").touch()
    raise PermissionError(1, "Operation not permitted")

def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

os.memfd_create, pwd.getpwuid = memfd_create, getpwuid
"""
SCRIPT = """
from pathlib import Path
from patchpar.launch.local import LocalExecutor
from tests.launch.conftest import TOY

try:
    Path.home()
except RuntimeError:
    with LocalExecutor(["cpu", "cpu"], TOY) as executor:
        print(executor.call("add_up", 1), executor.call("echo", b"x" * 1_000_000)[1][0][0][-1:], *executor.pids)
"""


def test_no_memfd_no_home_no_name_and_a_long_path_for_temporary_files(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(REFUSES)
    temporary = tmp_path / ("t" * 128)
    temporary.mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("HOME", "USER", "LOGNAME")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    message, _, pids = done.stdout.partition("b'x' ")
    assert message == "[3.0, 3.0] "
    refused = {path.name.partition("-")[2] for path in temporary.glob("refused-*")}
    assert {*pids.split()} < refused, "the workers, and who started them, have been refused a memfd"
    assert len(list(temporary.iterdir())) == len(refused), "nothing else is left"
