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
def test_only_news_is_said(caplog: pytest.LogCaptureFixture, name: str, text: str) -> None:
    hush()
    hush()
    logger = logging.getLogger(name)
    assert len(logger.filters) <= 1
    logger.addHandler(caplog.handler)
    try:
        logger.warning(text)
    finally:
        logger.removeHandler(caplog.handler)
    assert (text in caplog.text) == ((name, text) in NEWS)
