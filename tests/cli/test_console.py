"""The progress bar on stderr."""

from __future__ import annotations

import pytest

from patchpar.cli.console import progress
from patchpar.errors import PlanError


@pytest.mark.parametrize("steps", [0, 1])
def test_a_bar_is_left_of_a_run_that_has_begun_only(capsys: pytest.CaptureFixture[str], steps: int) -> None:
    """Where the plan is refused, the error stands alone; where a later step fails, the bar says how far it came."""
    with pytest.raises(PlanError), progress("generating") as step:
        for number in range(steps):
            step(number + 1, 4)
        raise PlanError("no such plan")
    found = capsys.readouterr().err
    assert ("generating" in found, "1/4" in found, found == "") == (
        (True, True, False) if steps else (False, False, True)
    )
