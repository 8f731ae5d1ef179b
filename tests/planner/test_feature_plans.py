"""Feature plans found in a narrow model without values are those that are found in the wide one with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.errors import UnsupportedModel
from patchpar.models.dry_run.dry_run import emptied
from patchpar.pipeline.planner.empty_call import arguments_of_first_call
from patchpar.pipeline.planner.feature_plans import narrow_configs, plan_without_values
from patchpar.shard.tensor.feature_plan import FeaturePlan
from patchpar.shard.tensor.lookup import discover_features
from tests import tiny
from tests.breadth import first_of

NAMES = ("flux", "sd3", "wan", "pixart", "qwen", "cogview4", "ltx", "hunyuan_video", "lumina2", "flux2", "sana")


CASES = [(name, 2) for name in NAMES if name in tiny.BUILDERS] + [("flux", 3)]


@pytest.mark.parametrize(("name", "size"), first_of(CASES, ("flux", 2)))
def test_a_plan_found_without_values_is_that_found_with_them(name: str, size: int) -> None:
    """Also for more ranks than heads, which share the features of other Linears."""
    built = tiny.build(name)
    call = arguments_of_first_call(built.denoiser, lambda: built.pipe(**built.call_kwargs))
    wanted = discover_features(built.denoiser, built.denoiser.forward, (call.args, call.kwargs), size)
    emptied(built.pipe)
    found = plan_without_values(built.pipe, built.denoiser, built.call_kwargs, size)
    assert cuts(found) == cuts(wanted)


def cuts(plan: FeaturePlan) -> list[Any]:
    return sorted((each.name, each.paths, each.columns, each.rows, each.norms, each.counts) for each in plan.blocks)


@pytest.mark.parametrize(("name", "linear", "counted"), [("flux", "attn.to_q", False), ("wan", "attn1.to_q", True)])
def test_a_wide_model_is_searched_in_a_narrow_one(name: str, linear: str, counted: bool) -> None:
    """12 heads of which each of 2 ranks gets 6: the search runs with 2, and runs of features and numbers are scaled.

    FLUX divides features by the width of a head in new versions of diffusers, which counts no heads.
    """
    built = tiny.build(name)
    config = {**built.denoiser.config, "num_attention_heads": 12}
    with torch.device("meta"):
        wide: Any = type(built.denoiser).from_config(config)
    narrow = next(narrow_configs(wide, 2))
    assert narrow["num_attention_heads"] == 2
    built.pipe.register_modules(transformer=wide.eval())
    emptied(built.pipe)
    found = plan_without_values(built.pipe, wide, built.call_kwargs, 2)
    width = 12 * config["attention_head_dim"]
    query = next(cut for block in found.blocks for cut in block.columns if cut.path.endswith(linear))
    assert query.runs == (((0, width // 2),), ((width // 2, width),))
    heads = {count.values for block in found.blocks for count in block.counts if count.name == "heads"}
    assert heads == {(6, 6)} or not (heads or counted)


def test_lists_of_a_configuration_in_a_file_are_no_widths(tmp_path: Path) -> None:
    """Of a model that is loaded from its folder, entries are lists that are tuples in a model made here."""
    built = tiny.build("flux")
    built.denoiser.save_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert any(isinstance(value, list) for value in config.values())
    built.denoiser.register_to_config(**{name: value for name, value in config.items() if name[0] != "_"})
    assert len(list(narrow_configs(built.denoiser, 2))) == 6


def test_features_that_cannot_be_shared_are_refused() -> None:
    built = tiny.build("flux")
    emptied(built.pipe)
    with pytest.raises(UnsupportedModel, match=r"found by values.*use patch=N"):
        plan_without_values(built.pipe, built.denoiser, built.call_kwargs, 1000)
