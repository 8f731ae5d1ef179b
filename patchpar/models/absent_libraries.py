"""Optional libraries that a process takes to be absent, since it only records what calls would do.

diffusers and transformers import these where they are installed, for adapters, quantised weights and training, and do
without them where they are not. A process that has left them out stays so: it is for commands that end afterwards.
"""

import sys
from types import ModuleType

from patchpar.models.changed_modules import ChangingFinder

LIBRARIES = (
    *("accelerate", "peft", "bitsandbytes", "torchao", "optimum", "deepspeed", "xformers", "flash_attn"),
    *("sklearn", "pandas", "wandb", "triton", "psutil"),
)
DISTRIBUTED = "torch.distributed"
"""Says that it is not available, so that no tensors over several processes are imported."""


def leave_out_libraries() -> None:
    """Let LIBRARIES be absent from now on, except for those that were imported before. Idempotent."""
    for name in LIBRARIES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as the import system documents
    finders = [each for each in sys.meta_path if isinstance(each, ChangingFinder)]
    if DISTRIBUTED not in sys.modules and not any(DISTRIBUTED in each.changes for each in finders):
        sys.meta_path.insert(0, ChangingFinder({DISTRIBUTED: _leave_alone}))


def _leave_alone(distributed: ModuleType) -> None:
    distributed.is_available = lambda: False  # type: ignore[attr-defined]
