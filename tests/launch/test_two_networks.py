"""Two hosts as far as the kernel can be two: network namespaces with one cable between them, and torchrun in each."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.distant_hosts import SECRET

pytestmark = pytest.mark.breadth  # test_torchrun has the same ranks with one network
PORT = 29517


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def networks():
    """Two namespaces, of 10.77.0.1 and 10.77.0.2, and the names of their interfaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("only root can make network namespaces, with ip of iproute2")
    names = [f"patchpar-{os.getpid()}-{side}" for side in "ab"]
    cards = [f"pp{os.getpid() % 10**6}{side}" for side in "ab"]
    with ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", cards[0], "netns", names[0], "type", "veth", "peer", "name", cards[1], "netns", names[1])
        for side, (name, card) in enumerate(zip(names, cards, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{side}/24", "dev", card)
            for each in (card, "lo"):
                ip("-n", name, "link", "set", each, "up")
        yield list(zip(names, cards, strict=True))


def test_ranks_of_two_networks_need_a_secret(networks, tmp_path):
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_text(SECRET)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "10.77.0.1", "--master-port", str(PORT)]
    script = ["-m", "tests.launch.on_networks", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *torchrun, "--node-rank", str(side), *script],
            env={**os.environ, "GLOO_SOCKET_IFNAME": card},
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        for side, (name, card) in enumerate(networks)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        kind, text = found["nothing given"]
        assert kind == "LaunchError"
        assert "not known to run on one Linux host" in text
        assert found["secret"]["sealed"] == [True, True]
        assert found["secret"]["links"] is False
        assert found["secret"]["add_up"] == 7.0
