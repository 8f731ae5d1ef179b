"""What libraries say in every rank is no news; what is news is said all the same."""

from __future__ import annotations

import logging

import pytest

from patchpar.models.hush import hush

NOISE = (
    (
        "diffusers.models.modeling_utils",
        "There are modules in AutoencoderKL that should be kept in float32: []. Casting",
    ),
    ("transformers.utils.import_utils", "`CLIPImageProcessor` requires torchvision (not installed); falling back"),
)
NEWS = (
    ("diffusers.models.modeling_utils", "There are modules in X that should be kept in float32: ['norm']. Casting"),
    ("diffusers.models.modeling_utils", "Some weights of the model checkpoint were not used"),
)


@pytest.mark.parametrize(("name", "text"), [*NOISE, *NEWS])
def test_only_news_is_said(name: str, text: str) -> None:
    """Whatever the verbosity that a program has chosen for the whole of a library."""
    hush()
    before = list(logging.getLogger(name).filters)
    hush()
    logger = logging.getLogger(name)
    assert logger.filters == before
    record = logger.makeRecord(name, logging.WARNING, __file__, 1, text, (), None)
    is_said = logger.level <= logging.WARNING and bool(logger.filter(record))
    assert is_said == ((name, text) in NEWS)
