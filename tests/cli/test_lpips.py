"""LPIPS is a distance, and its weights come from a file that cannot run anything."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from patchpar.cli.bench.lpips import Lpips, extract, fetch, read_arrays

ALEXNET = ((11, 3, 64), (5, 64, 192), (3, 192, 384), (3, 384, 256), (3, 256, 256))


def weights(scale: float = 1.0) -> dict[str, Any]:
    """Arrays as in the archive, at random."""
    rng = np.random.default_rng(0)

    def layer(side: int, into: int, out: int) -> dict[str, Any]:
        kernel = rng.standard_normal((side, side, into, out)) / (side * into**0.5)
        return {"kernel": kernel.astype(np.float32), "bias": np.zeros(out, np.float32)}

    trunk = {f"Conv_{index}": layer(*shape) for index, shape in enumerate(ALEXNET)}
    linear = {
        f"NetLinLayer_{index}": {"Conv_0": {"kernel": np.full((1, 1, out, 1), scale, np.float32)}}
        for index, (_, _, out) in enumerate(ALEXNET)
    }
    return {"AlexNet_0": trunk, **linear}


def stored(path: Path, content: object) -> Path:
    path.write_bytes(pickle.dumps(content))
    return path


@pytest.fixture(scope="module")
def lpips(tmp_path_factory: pytest.TempPathFactory) -> Lpips:
    return Lpips(stored(tmp_path_factory.mktemp("lpips") / "weights", weights()))


def image(seed: int = 0, batch: int = 2) -> Tensor:
    small = torch.rand(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return functional.interpolate(small, size=(64, 72), mode="bilinear")


def noisy(sigma: float) -> Tensor:
    return image() + sigma * torch.randn(2, 3, 64, 72, generator=torch.Generator().manual_seed(9))


def test_equal_images_are_at_no_distance(lpips: Lpips) -> None:
    assert lpips(image(), image()).tolist() == [0.0, 0.0]


def test_more_noise_is_farther(lpips: Lpips) -> None:
    far = [lpips(image(), noisy(sigma)) for sigma in (0.02, 0.1, 0.4)]
    assert (far[0] > 0).all()
    assert (far[0] < far[1]).all()
    assert (far[1] < far[2]).all()


def test_it_is_symmetric(lpips: Lpips) -> None:
    assert torch.allclose(lpips(image(), noisy(0.2)), lpips(noisy(0.2), image()))


def test_every_image_is_judged_alone(lpips: Lpips) -> None:
    one, other = image(), torch.cat([image()[:1], image(1)[:1]])
    both = lpips(one, other)
    assert both[0] == 0
    assert torch.allclose(both[1:], lpips(one[1:], other[1:]), rtol=1e-4)


def test_the_last_layer_weighs_the_differences(tmp_path: Path, lpips: Lpips) -> None:
    heavier = Lpips(stored(tmp_path / "weights", weights(scale=3.0)))
    assert torch.allclose(heavier(image(), noisy(0.2)), 3 * lpips(image(), noisy(0.2)))


def test_images_of_different_size(lpips: Lpips) -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 64, 72\) and \(2, 3, 64, 64\)"):
        lpips(image(), image()[..., :64])


def test_a_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    file = stored(tmp_path / "weights", {"AlexNet_0": Bad()})
    with pytest.raises(ValueError, match="mkdir"):
        read_arrays(file)
    assert not (tmp_path / "made").exists()
    pickle.loads(file.read_bytes())
    assert (tmp_path / "made").exists(), "the control: a plain unpickler runs it"


@pytest.mark.parametrize("content", [{}, {"AlexNet_0": {}}, weights() | {"NetLinLayer_4": 3}])
def test_other_arrays_are_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not hold the weights of LPIPS"):
        Lpips(stored(tmp_path / "weights", content))


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1, 2])])
def test_no_pickle_of_arrays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(ValueError, match="weights"):
        Lpips(tmp_path / "weights")


def test_only_the_archive_we_know_is_opened(tmp_path: Path) -> None:
    archive = tmp_path / "it.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        member = tarfile.TarInfo("it/weights")
        member.size = 3
        opened.addfile(member, io.BytesIO(b"abc"))
    with pytest.raises(RuntimeError, match="not the archive we know"):
        extract(archive)
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert extract(archive, sha256=checksum, member="it/weights") == b"abc"


def test_what_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchpar.cli.bench.lpips._download", lambda folder: pytest.fail("it must not be fetched"))
    (tmp_path / "lpips-alexnet-0.1.pickle").write_bytes(b"weights")
    assert fetch(tmp_path).read_bytes() == b"weights"
