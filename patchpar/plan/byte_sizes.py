"""Numbers of bytes as text."""


def readable_bytes(count: float) -> str:
    """Return a number of bytes with a unit: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
