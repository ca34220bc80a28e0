"""Numbers for readers: counts with their noun, bytes in a short unit. Every plan and report uses these functions."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Count with its noun: 1 -> "1 rank", 2000 -> "2,000 ranks"; `plural` if the plural is not the noun with an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def size(num_bytes: int) -> str:
    """Bytes in the unit that keeps the number short: "15.3 GiB"."""
    amount, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.3g} {units[0]}"
