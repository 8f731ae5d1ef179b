"""What new workers are told: every call once, and of what is set again and again the last."""

import pytest

from patchpar.launch.replay import CallEffects, ReplayedCall, ReplayLog


def reported(*names: str | None) -> list[int]:
    """The numbers of the calls that are repeated, of calls that set these; None sets nothing that is known."""
    replays = ReplayLog()
    for number, name in enumerate(names):
        replays.add(
            ReplayedCall(
                method="set", args=(number,), kwargs={}, expected=0.0, sent=None, change=CallEffects(sets=name)
            )
        )
    return [entry.args[0] for entry in replays]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ([None, None], [0, 1]),
        (["scheduler", "scheduler", "scheduler"], [2]),
        (["scheduler", "vae.tile", "scheduler", "vae.tile"], [2, 3]),
        (["scheduler", None, "scheduler", "scheduler"], [0, 1, 3]),
        (["unet", "unet.gain", "unet"], [0, 1, 2]),
        (["unet.gain", "unet", "unet.gain"], [0, 1, 2]),
        (["unet", "unet_two", "unet"], [1, 2]),
    ],
)
def test_what_is_set_again_is_repeated_once(names: list[str | None], kept: list[int]) -> None:
    assert reported(*names) == kept


def test_a_server_that_sets_a_scheduler_for_every_image_keeps_one() -> None:
    assert reported(None, *["scheduler"] * 1000) == [0, 1000]
