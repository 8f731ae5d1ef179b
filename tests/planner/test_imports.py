"""What `patchpar plan` imports the first time: what records a call, and none of what takes seconds beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from tests.versions import TORCH

WITHOUT = (
    *("torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("sympy.core", "accelerate.utils", "peft.tuners", "pandas.core", "diffusers.models.transformers.transformer_flux"),
    *("triton.runtime", "torch.export.custom_ops", "requests.sessions", "psutil"),
    *("torch.masked.maskedtensor", "torch.quantization.quantize", "torch.nn.intrinsic.modules"),
    *("patchpar.pipeline.caller", "patchpar.launch.local"),
)
"""Modules by which those that run are known: deferred ones are there, and empty."""
OF_OLD_TORCH = ("sympy.core",) if Version("2.7") > TORCH else ()
"""torch 2.6 makes classes from it when it is imported."""
NEEDED = "diffusers.models.unets.unet_2d_condition"
CODE = """
import gc, sys
from patchpar.cli import main
sys.argv = ["patchpar", "plan", "embedded", "--machine", "2xH100", "--dtype", "float16", "--height", "128"]
try:
    main()
finally:
    print("imported", *sorted(name for name, module in sys.modules.items() if module is not None))
    if "torch" not in sys.modules:
        sys.exit()
    scan = sys.modules["transformers.utils.import_utils"].create_import_structure_from_path
    finds = sys.modules["torch.library"].inspect.getmodule.__name__
    print("scanned", scan.cache_info().hits, scan.cache_info().misses, gc.isenabled(), finds)
"""


def planned(home: Path) -> tuple[list[str], str]:
    """The names of what the command has imported, and what it prints."""
    answer = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={"HOME": str(home), "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert not answer.stderr
    printed, _, end = answer.stdout.partition("imported ")
    return end.split(), printed


def test_a_first_plan_imports_neither_the_compiler_nor_optional_libraries(tmp_path: Path) -> None:
    """Nothing is kept: it has to record. The second time it imports nothing of all that, and prints the same."""
    names, printed = planned(tmp_path)
    assert "plan      " in printed
    *names, _, hits, misses, collects, finds = names
    assert NEEDED in names
    assert not [each for each in WITHOUT if each in names and each not in OF_OLD_TORCH]
    assert int(hits) > int(misses) / 2 > 100, "transformers asks twice for each folder, and reads it once"
    assert collects == "False"
    assert finds == "module_of", "torch looks at no file of a module to find that of a frame"
    again, same = planned(tmp_path)
    assert same == printed
    assert not {"torch", "diffusers", "pydantic"} & {*again}
