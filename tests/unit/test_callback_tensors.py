"""What a callback has changed of the tensors that it got: others in its answer, and what it has written to."""

from __future__ import annotations

import pytest
import torch

from patchpar.errors import PlanError
from patchpar.pipeline.step_callbacks import CallbackTensors, refuse_for_some_prompts


def test_what_is_as_before_is_not_changed() -> None:
    given = {"latents": torch.zeros(2), "prompt_embeds": torch.zeros(3)}
    seen = CallbackTensors(given)
    assert seen.changed({}) == seen.changed(given) == {}


def test_others_and_those_that_were_written_to_are() -> None:
    """diffusers' own loop goes on with a tensor that was written to, whether it is in the answer or not."""
    given = {"latents": torch.zeros(2), "prompt_embeds": torch.zeros(3)}
    seen, embeds = CallbackTensors(given), torch.ones(3)
    given["latents"].add_(1)
    assert set(seen.changed({})) == {"latents"}
    given["prompt_embeds"] = embeds  # in the dict of the call, and not in the answer
    assert set(seen.changed({})) == {"latents"}
    assert seen.changed(given) == {"latents": given["latents"], "prompt_embeds": embeds}
    assert seen.changed({"negative_prompt_embeds": None}).keys() == {"latents", "negative_prompt_embeds"}


def test_tensors_of_inference_mode_do_not_count_how_often_they_are_written_to() -> None:
    with torch.inference_mode():
        given = {"latents": torch.zeros(2)}
        seen = CallbackTensors(given)
        assert seen.changed(given) == seen.changed({}) == {}
        given["latents"].add_(1)
        assert set(seen.changed(given)) == set(seen.changed({})) == {"latents"}


def test_tensors_of_some_prompts_are_not_for_all() -> None:
    refuse_for_some_prompts({"latents"}, 1)
    refuse_for_some_prompts((), 2)
    with pytest.raises(PlanError, match=r"has changed latents, but with data=2 it gets those of.*use data=1"):
        refuse_for_some_prompts({"latents"}, 2)
