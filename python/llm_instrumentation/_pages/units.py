"""Writes numbers for people, with units and few digits."""

from __future__ import annotations

import math

_TIMES = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
UNKNOWN = "–"


def seconds(value: float) -> str:
    """A time: ``12.3 s``, ``340 ms``, ``2.5 µs``; in minutes from 10 min, in hours from 10 h."""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0 s"
    if value >= 36_000:
        return f"{_digits(value / 3600)} h"
    if value >= 600:
        return f"{_digits(value / 60)} min"
    # A value that rounds up to 1000 of a unit is written as 1 of the next.
    fitting = [unit for unit in _TIMES if abs(value) >= unit[0] * 0.9995]
    factor, name = fitting[-1] if fitting else _TIMES[0]
    return f"{_digits(value / factor)} {name}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """The unit of an axis that ends at ``longest_s``: its length in seconds, and its name."""
    return next((unit for unit in reversed(_TIMES) if longest_s >= unit[0]), _TIMES[0])


def size(count: float) -> str:
    """A size in units of 1,024: ``512 B``, ``4 KiB``, ``1.5 GiB``."""
    if not math.isfinite(count):
        return UNKNOWN
    power = 0
    while abs(count) >= 1023.5 and power < len(_BYTES) - 1:
        count /= 1024
        power += 1
    return f"{_digits(count)} {_BYTES[power]}"


def count(value: float) -> str:
    """A count: ``12,345``; from ten million on in words: ``12.3 million``."""
    if not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 1e10:
        return f"{_digits(value / 1e9)} billion"
    if abs(value) >= 1e7:
        return f"{_digits(value / 1e6)} million"
    return f"{value:,.0f}"


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``1,200 layers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def tokens(value: float) -> str:
    """``1 token``, ``2.5 tokens``."""
    return f"{value:,.4g} token{'' if value == 1 else 's'}"


def short_count(value: float) -> str:
    """A count for the ticks of an axis: ``12k``, ``3M``."""
    for factor, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:g}{name}"
    return f"{value:g}"


def ratio(value: float) -> str:
    """A ratio with two decimals. It has more if two would show 0 or 1: ``0.003``, ``0.9996``."""
    if not math.isfinite(value):
        return UNKNOWN
    if value not in (0, 1):
        for digits in (2, 3, 4):
            text = f"{value:.{digits}f}"
            if float(text) not in (0, 1):
                return text
        return f"{value:.2g}" if abs(value) < 0.5 else f"{value:.6g}"
    return f"{value:.2f}"


def percent(part: float) -> str:
    """A part of 1 as a percentage: ``77 %``, ``2.3 %``, ``under 0.1 %``."""
    if not math.isfinite(part):
        return UNKNOWN
    if 0 < part < 0.001:
        return "under 0.1 %"
    return f"{part * 100:.0f} %" if part >= 0.0995 or part == 0 else f"{part * 100:.1f} %"


def times(value: float) -> str:
    """``45 times``, ``1.5 times``, ``once``."""
    if not math.isfinite(value):
        return UNKNOWN
    return "once" if value == 1 else f"{_grouped(value)} times"


def _grouped(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else _digits(value)


def _digits(value: float) -> str:
    """Three significant digits, but all digits before the point, and no zeros at the end."""
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
