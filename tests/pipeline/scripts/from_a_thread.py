"""Two pipelines, one made in a thread that has ended, neither closed; then the script fails. Reads MODEL from argv."""

from __future__ import annotations

import sys
import threading
from typing import Any

from patchpar import ParallelPipeline

made: list[ParallelPipeline] = []
options: dict[str, Any] = {"devices": "cpu:2", "plan": "patch=2"}
thread = threading.Thread(target=lambda: made.append(ParallelPipeline.from_pretrained(sys.argv[1], **options)))
thread.start()
thread.join()
made.append(ParallelPipeline.from_pretrained(sys.argv[1], **options))
assert not {"torch", "numpy", "diffusers", "transformers"} & set(sys.modules)  # this process only drives them

import torch  # noqa: E402

images = []
for pipe in made:
    generator = torch.Generator().manual_seed(3)
    output = pipe("a small red house", None, 128, 128, 2, generator=generator, output_type="latent")
    images.append(output.images)
assert torch.equal(*images)
sys.stdout.write("drawn\n")
raise LookupError("the script's own mistake")
