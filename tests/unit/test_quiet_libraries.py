"""What libraries say in every rank is no news; what is news is said all the same."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from patchpar.models.files import embedded_model
from patchpar.models.loading import DTYPE_NAME, with_dtype
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.runner import PipelineRunner
from patchpar.stream.causal.runner import StreamRunner
from patchpar.stream.fifo.runner import FifoRunner
from patchpar.stream.images.runner import ImageRunner

NOISE = (
    (
        "diffusers.models.modeling_utils",
        "There are modules in AutoencoderKL that should be kept in float32: []. Casting",
    ),
    ("transformers.utils.import_utils", "`CLIPImageProcessor` requires torchvision (not installed); falling back"),
    (
        "transformers.tokenization_utils_base",
        "Token indices sequence length is longer than the specified maximum sequence length for this model (90 > 77).",
    ),
)
NEWS = (
    ("diffusers.models.modeling_utils", "There are modules in X that should be kept in float32: ['norm']. Casting"),
    ("diffusers.models.modeling_utils", "Some weights of the model checkpoint were not used"),
    ("transformers.tokenization_utils_base", "The tokenizer has no padding token"),
)


@pytest.mark.parametrize(("name", "text"), [*NOISE, *NEWS])
def test_only_news_is_said(name: str, text: str) -> None:
    """Whatever the verbosity that a program has chosen for the whole of a library."""
    silence_libraries()
    before = list(logging.getLogger(name).filters)
    silence_libraries()
    logger = logging.getLogger(name)
    assert logger.filters == before
    record = logger.makeRecord(name, logging.WARNING, __file__, 1, text, (), None)
    is_stated = logger.level <= logging.WARNING and bool(logger.filter(record))
    assert is_stated == ((name, text) in NEWS)


@pytest.mark.parametrize("engine", [PipelineRunner, StreamRunner, FifoRunner, ImageRunner])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_among_others_is_silent_before_a_model_arrives(
    engine: Any, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpickling a pipeline imports its module, and with that image processors that speak of torchvision."""
    logger = logging.getLogger("transformers.utils.import_utils")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    engine(SimpleNamespace(rank=0, world_size=ranks, device="cpu"))
    assert (logger.level == logging.ERROR) == (ranks > 1)  # alone it is in the process of the user, who decides


def test_a_dtype_has_the_name_that_diffusers_takes() -> None:
    for options in ({"torch_dtype": "float16"}, {"dtype": torch.float16}, {"torch_dtype": None, "dtype": "float16"}):
        assert with_dtype(options) == {DTYPE_NAME: torch.float16}
    assert with_dtype({"torch_dtype": None, "variant": "fp16"}) == {"variant": "fp16"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoencoderKL.from_pretrained(embedded_model() / "vae", variant="fp16", **{DTYPE_NAME: torch.float32})


SPEAKS = """import logging, threading
say = logging.getLogger("transformers.utils.import_utils").warning
say("of the import")
other = threading.Thread(target=say, args=("of another thread",))
other.start()
other.join()
"""


def test_what_a_call_imports_for_its_output_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the middle of a call on workers, in a process whose own imports say what libraries say."""
    (tmp_path / "speaks_when_imported.py").write_text(SPEAKS)
    monkeypatch.syspath_prepend(tmp_path)
    logger = logging.getLogger("transformers.utils.import_utils")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(logger, "_cache", {})  # of levels, which may be those of an earlier test
    stated, handler = list[str](), logging.Handler()
    monkeypatch.setattr(handler, "handle", lambda record: stated.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    caller = CallController(None, {}, kind="local", output_module="speaks_when_imported")
    with caller.reporting(lambda step, steps: None, {}):
        caller.on_event(0, ("step", 1, 2))
    logger.warning("later")
    assert stated == ["of another thread", "later"]
