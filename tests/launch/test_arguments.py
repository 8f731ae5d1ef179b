"""Whether ranks with a caller each make the same call: what differs is named, what may differ does not count."""

import enum
import string
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import EulerDiscreteScheduler

from patchpar.errors import ArgumentMismatch
from patchpar.launch.argument_mismatch import compare, described
from patchpar.pipeline.messages import CallOptions
from patchpar.plan.plan import Plan


class Shade(enum.Enum):
    LIGHT, DARK = 1, 2


@dataclass(frozen=True)
class Options:
    steps: int = 1
    quiet: bool = field(default=False, metadata={"per rank": True})


def reported(*values):
    """What is said when ranks are called with these values, in order; empty if nothing."""
    try:
        compare([described("generate", ({"value": value},), {}) for value in values])
    except ArgumentMismatch as error:
        return str(error)
    return ""


def image(value):
    return PIL.Image.new("RGB", (8, 8), (value, 0, 0))


DIFFERENT = {
    "text": ("a dog", "a cat"),
    "number": (7.5, 7.0),
    "kind of number": (1, True),
    "missing": (None, "a cat"),
    "list": (["a", "b"], ["a", "c"]),
    "longer list": (["a"], ["a", "a"]),
    "nested": ([["a"], "b"], [["a", "b"]]),
    "mapping": ({"scale": 1.0}, {"scale": 2.0}),
    "names of a mapping": ({"scale": 1.0}, {"strength": 1.0}),
    "set": ({"a", "b"}, {"a", "c"}),
    "tensor": (torch.zeros(4), torch.ones(4)),
    "shape": (torch.zeros(4), torch.zeros(2, 2)),
    "dtype": (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
    "dtype of the same bytes": (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
    "of a parameter": (torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))),
    "scalar": (torch.tensor(1.0), torch.tensor(2.0)),
    "array": (np.zeros(4), np.ones(4)),
    "dtype of an array": (np.zeros(4, np.float32), np.zeros(4, np.int32)),
    "image": (image(1), image(2)),
    "mode of an image": (PIL.Image.new("L", (8, 8)), PIL.Image.new("P", (8, 8))),
    "images": ([image(1)], [image(2)]),
    "path": (Path("/a/model"), Path("/a/other")),
    "dataclass": (Options(steps=1), Options(steps=2)),
    "plan": (Plan(patch=2), Plan(cfg=2)),
    "strategy": (Plan(patch=2, strategy="exact"), Plan(patch=2, strategy="displaced")),
    "enum": (Shade.LIGHT, Shade.DARK),
    "torch dtype": (torch.float16, torch.float32),
    "config": (EulerDiscreteScheduler(), EulerDiscreteScheduler(beta_start=0.1)),
    "function": (string.capwords, len),
}
SAME = {
    "text": ("a dog", "a dog"),
    "text that was put together": ("a dog", "".join(["a", " ", "dog"])),
    "not a number": (float("nan"), float("nan")),
    "order of a mapping": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "set": ({"ab", "cd", "ef"}, {"ef", "cd", "ab"}),
    "order of a set": ({0, 8}, {8, 0}),
    "memory of a tensor": (torch.zeros(2, 4), torch.zeros(4, 2).T),
    "bits": (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "empty": (torch.zeros(0, 3), torch.zeros(0, 3)),
    "a generator, which all take from rank 0": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "a device of one's own": (torch.device("cuda:0"), torch.device("cuda:1")),
    "the same file elsewhere": (Path("/a/model"), Path("/b/model")),
    "what may differ": (Options(quiet=True), Options(quiet=False)),
    "of our own": (CallOptions(plan=Plan(), tracing=True), CallOptions(plan=Plan(), quiet=True)),
    "nobody knows what is in it": (object(), object()),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs(name):
    first, second = DIFFERENT[name]
    assert "generate: argument 'value' differs: " in reported(first, second)
    assert "on rank 0, " in reported(first, first, second)
    assert "on rank 2. " in reported(first, first, second)
    assert not reported(first, first)
    assert not reported(second, second)


@pytest.mark.parametrize("name", SAME)
def test_what_does_not(name):
    assert not reported(*SAME[name])


def test_text_that_is_a_path_here(tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder / "model").mkdir(parents=True)
    assert not reported(str(tmp_path / "first" / "model"), str(tmp_path / "second" / "model"))
    assert reported(str(tmp_path / "first"), str(tmp_path / "second"))
    assert not reported("a dog " * 2000, "a dog " * 2000), "no path is as long"


def test_the_values_are_named():
    assert "'a dog' on rank 0, 'a cat' on rank 1. Under torchrun every process makes the same call" in reported(
        "a dog", "a cat"
    )
    assert "a Tensor of shape (2, 3) on rank 0, None on rank 1" in reported(torch.zeros(2, 3), None)
    assert len(reported("x" * 10_000, "y" * 10_000)) < 400


def test_what_only_some_are_given():
    calls = [described("generate", ({"prompt": "a"},), {}), described("generate", ({"prompt": "a", "height": 8},), {})]
    with pytest.raises(ArgumentMismatch, match="argument 'height' differs: not given on rank 0, 8 on rank 1"):
        compare(calls)
    with pytest.raises(ArgumentMismatch, match="argument 'height' differs: 8 on rank 0, not given on rank 1"):
        compare(calls[::-1])
    with pytest.raises(ArgumentMismatch, match="load: argument 1 differs: 'a' on rank 0, 'b' on rank 1"):
        compare([described("load", ("a",), {}), described("load", ("b",), {})])
    with pytest.raises(ArgumentMismatch, match="the call differs: load on rank 0, generate on rank 1"):
        compare([described("load", (), {}), described("generate", (), {})])
