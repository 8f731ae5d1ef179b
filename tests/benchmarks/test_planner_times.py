"""What the benchmark of the planner measures, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.page import contents
from benchmarks.planner_times import CASES, Seconds, lines, save_flux, seconds_of
from patchpar.plan.replay.machine import Machine


def test_a_row_says_whether_its_limit_is_held_by_processor_time() -> None:
    found = {CASES[0]: Seconds(9.0, 4.0), CASES[1]: Seconds(0.9, 0.6)}
    (page,) = contents("\n".join(lines(found, 3, "5.0 on 2 cores")) + "\n")
    assert [list(row.values()) for row in page["tables"][0]] == [
        [CASES[0].what, "9.00", "4.00", "5", "yes"],
        [CASES[1].what, "0.90", "0.60", "0.5", "no"],
    ]


def test_a_kept_plan_is_found_again_sooner(tmp_path: Path) -> None:
    first, kept = (seconds_of(case, tmp_path, runs=1) for case in CASES[:2])
    assert kept.processor < first.processor / 2


def test_machines_have_as_many_devices_as_the_page_says() -> None:
    machines = {case.words[3]: case.what for case in CASES if "--machine" in case.words}
    for name, what in machines.items():
        assert f"{Machine.parse(name).devices:,} devices" in what


def test_the_folder_of_flux_has_its_own_size_and_no_weights(tmp_path: Path) -> None:
    save_flux(tmp_path)
    assert json.loads((tmp_path / "transformer" / "config.json").read_text())["num_single_layers"] == 38
    assert json.loads((tmp_path / "text_encoder_2" / "config.json").read_text())["d_model"] == 4096
    assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.bin")]
