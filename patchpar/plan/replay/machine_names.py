"""Names of devices of the catalogue, and the nearest name of a machine to one that cannot be read."""

import re
from difflib import get_close_matches

from patchpar.errors import PlanError
from patchpar.plan.replay.device_catalogue import DEVICES, DeviceSpec

NAMES = {device.name.lower(): device for device in DEVICES}
NETWORK = "ib400"
"""Between hosts, where a text names no other."""
CLOSE = 0.5
_COUNTS = re.compile(r"\d{1,9}-(?=[a-z])|(?:\(?\d{1,9}(?:[x*(]+|(?=[a-z])))*")
"""The numbers of hosts and of devices that a text begins with."""
_LINK, _NETWORK = re.compile(r"-(nvlink|pcie\d)"), re.compile(r"-((?:eth|ib)\d+)")


def device_named(name: str) -> DeviceSpec:
    """Return a device of the catalogue. Raises PlanError that lists all, and names one that is meant perhaps."""
    found = NAMES.get(_plain(name))
    if found is None:
        near = get_close_matches(_plain(name), NAMES, n=1, cutoff=CLOSE)
        nearest = f", the nearest is {NAMES[near[0]].name}" if near else ""
        raise PlanError(
            f"no device {name!r} in the catalogue{nearest}: use one of {', '.join(device.name for device in DEVICES)}"
        )
    return found


def nearest_machine(text: str) -> str:
    """Return a machine's name in its form from a text such as 8H100; empty where no device can be made out."""
    parts = [_nearest_part(part) for part in _plain(text).split("+")]
    if not all(devices for _, devices in parts):
        return ""
    link, network = _LINK.search(_plain(text)), _NETWORK.search(_plain(text))
    hosts = [hosts for hosts, _ in parts if hosts]
    inside = "+".join(devices for _, devices in parts) + (link[0] if link else "")
    if not hosts and network is None:
        return inside
    return f"{hosts[0] if hosts else 1}x({inside})-{network[1] if network else NETWORK}"


def _nearest_part(text: str) -> tuple[str, str]:
    """Return the number of hosts, or nothing, and devices of one kind in their form; empty where there are none."""
    lead = _COUNTS.match(text)
    assert lead is not None  # it may be empty
    counts, rest = re.findall(r"\d+", lead[0]), text[lead.end() :]
    inside = [name for name in NAMES if name in rest]
    word = re.split(r"[^a-z0-9]", rest)[0]
    near = inside or get_close_matches(f"rtx{word}" if word.isdigit() else word, NAMES, n=1, cutoff=CLOSE)
    if not near:
        return "", ""
    *hosts, count = counts or ["1"]
    return "".join(hosts[:1]), f"{count}x{NAMES[max(near, key=len)].name}"


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("_", "")
