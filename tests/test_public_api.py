"""What a user may rely on: the public names, and that importing them costs nothing."""

import subprocess
import sys

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


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DisplacedPach"):
        patchpar.DisplacedPach  # noqa: B018


def test_importing_the_pipeline_imports_nothing_heavy() -> None:
    """The controller must be able to start its workers before it pays for torch itself."""
    code = "import sys\nfrom patchpar import ParallelPipeline, Plan, PlanError\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not HEAVY & set(answer.stdout.split())
