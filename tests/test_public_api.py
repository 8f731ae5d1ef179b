"""What a user may rely on: the public names, and that importing them costs nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import patchpar

PUBLIC = {
    "ParallelPipeline",
    "Plan",
    "Run",
    "DisplacedPatch",
    "ExactPatch",
    "PartiallyConditioned",
    "PipedStages",
    "StreamingPipeline",
    "ImageStreamingPipeline",
    "FifoConfig",
    "FifoOptions",
    "FifoStreamingPipeline",
    "StreamConfig",
    "StreamDelivery",
    "StreamPlan",
    "CausalOptions",
    "StructureGuidance",
    "PatchparError",
    "PlanError",
    "ArgumentMismatch",
    "AuthenticationError",
    "CallCancelled",
    "CallSuspended",
    "ExchangeError",
    "FreshEdges",
    "LaunchError",
    "UnsupportedModel",
    "VerificationError",
    "WorkerDied",
    "WorkerError",
    "WorkerHung",
    "WorkerOutOfMemory",
    "RetriesExhausted",
    "SuspendedCall",
    "Team",
    "shard_module",
    "upscale",
}
HEAVY = {"torch", "diffusers", "transformers", "accelerate", "numpy", "PIL"}


def test_public_names_are_pinned() -> None:
    """Adding a name is a decision; taking one away is a new major version."""
    assert set(patchpar.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(patchpar, name) is not None


def without_a_page(kind: type, text: str) -> set[str]:
    """Public names of a class of this package, and of those that it derives from, that are not in a text."""
    own = [each for each in kind.__mro__ if each.__module__.startswith("patchpar.")]
    names = {name for each in own for name in vars(each) if not name.startswith("_")}
    return {name for name in names if not re.search(rf"\b{name}\b", text)}


def test_what_a_pipeline_can_do_beside_that_of_diffusers_is_on_a_page() -> None:
    docs = Path(__file__).parent.parent / "docs"
    text = "".join(page.read_text() for page in (*docs.glob("*.md"), *docs.glob("howto/*.md")))
    assert without_a_page(patchpar.ParallelPipeline, text) == set()
    assert "take_back" in without_a_page(patchpar.ParallelPipeline, text.replace("take_back", "")), "control"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DisplacedPach"):
        patchpar.DisplacedPach  # noqa: B018


def test_importing_the_pipeline_imports_nothing_heavy() -> None:
    """The controller must be able to start its workers before it pays for torch itself."""
    code = "import sys\nfrom patchpar import ParallelPipeline, Plan, PlanError\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not HEAVY & set(answer.stdout.split())
