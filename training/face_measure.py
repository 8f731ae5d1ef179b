"""What a face in an image does and looks like, read from its pixels alone.

Heads stay within a few units of their place, so all boxes are fixed; see `training.faces` for the units.
"""

from __future__ import annotations

import numpy as np

from training.faces import HEAD_Y, INTERIOR, LIPS, MIDDLE, MOODS, MOUTH_Y, UNITS, Identity, Pose, render_face

Box = tuple[float, float, float, float]
MOUTH: Box = (MIDDLE - 5, HEAD_Y + MOUTH_Y - 13, MIDDLE + 5, HEAD_Y + MOUTH_Y + 12)
"""Left, top, right, bottom in units; so for all boxes."""
BROWS_AND_CHEEKS: Box = (MIDDLE - 19, HEAD_Y - 13, MIDDLE + 19, HEAD_Y + 12)
IDENTITY: dict[str, Box] = {
    "skin": (MIDDLE - 2, HEAD_Y - 9, MIDDLE + 2, HEAD_Y - 3),
    "hair": (MIDDLE - 8, HEAD_Y - 33, MIDDLE + 8, HEAD_Y - 30),
    "shirt": (MIDDLE - 26, 88, MIDDLE + 26, 95),
    "background": (1, 1, 12, 40),
}


def mouth_opening(frames_FHWC: np.ndarray) -> np.ndarray:
    """How tall the dark of the mouth is in each frame, in units, the mean over the middle of the mouth.

    A pixel is as much inside as it is nearer to the interior's colour than to skin and lips.
    """
    box = _cut(frames_FHWC, MOUTH).astype(np.float64)
    skin = _cut(frames_FHWC, IDENTITY["skin"]).mean((1, 2))[:, None, None]
    inside = _distance(box, np.array(INTERIOR))
    outside = np.minimum(_distance(box, skin), _distance(box, np.array(LIPS)))
    return (outside > inside).mean((1, 2)) * (MOUTH[3] - MOUTH[1])


def identity_error(frames_FHWC: np.ndarray, reference_HWC: np.ndarray) -> dict[str, float]:
    """By how much mean colours differ from the reference's, 0 to 255, for each part of the identity."""
    found = {}
    for name, box in IDENTITY.items():
        wanted = _cut(reference_HWC[None], box).mean((0, 1, 2))
        found[name] = float(np.abs(_cut(frames_FHWC, box).mean((1, 2)) - wanted).mean())
    return found


def moods_of(frames_FHWC: np.ndarray, identity: Identity) -> list[str]:
    """The mood of each frame: that of the diagram of this person, the head at one of nine places, that is nearest."""
    positions = [(dx, dy) for dx in (-2, 0, 2) for dy in (-2, -0.5, 1)]
    known = [(mood, Pose(mood=mood, dx=dx, dy=dy)) for mood in MOODS for dx, dy in positions]
    side = frames_FHWC.shape[1]
    rendered = _cut(np.stack([render_face(identity, pose, side=side) for _, pose in known]), BROWS_AND_CHEEKS)
    displayed = _cut(frames_FHWC, BROWS_AND_CHEEKS).astype(np.float64)
    return [known[int(((rendered - one) ** 2).mean((1, 2, 3)).argmin())][0] for one in displayed]


def correlation(one_F: np.ndarray, other_F: np.ndarray, lag: int = 0) -> float:
    """Pearson's correlation where `one` comes `lag` frames after `other`; 0 where one of them does not move."""
    count = len(one_F) - abs(lag)
    left, right = one_F[max(0, lag) :][:count], other_F[max(0, -lag) :][:count]
    if min(left.std(), right.std()) < 1e-6:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])


def _cut(frames_FHWC: np.ndarray, box: Box) -> np.ndarray:
    left, top, right, bottom = (round(edge * frames_FHWC.shape[1] / UNITS) for edge in box)
    return frames_FHWC[:, top:bottom, left:right]


def _distance(pixels: np.ndarray, color: np.ndarray) -> np.ndarray:
    return np.abs(pixels - color).sum(-1)
