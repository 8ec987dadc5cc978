"""Numbers as people read them, the same in the table and in the report; a unit never leaves its number."""

from __future__ import annotations

from datetime import UTC, datetime

UNKNOWN = "–"
_SPACE = "\N{NO-BREAK SPACE}"


def number(value: float | None, digits: int = 3) -> str:
    """`value` with so many significant digits, for example 0.00244, 12.3 or 1,234."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text or abs(value) < 1e-5 else f"{value:.6f}".rstrip("0")


def ordinal(value: int) -> str:
    """A place in a row, for example 2nd, 11th or 23rd."""
    ending = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"{value}{ending}"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference: `number` with a + where it is positive."""
    shown = number(value, digits)
    return f"+{shown}" if value is not None and value > 0 else shown


def share(value: float | None) -> str:
    """A share in per cent, for example 2.4 %; tiny ones keep two digits."""
    if value is None:
        return UNKNOWN
    return f"{number(value * 100, 2 if abs(value) < 0.1 else 3)}{_SPACE}%"


def seconds(value: float | None) -> str:
    """A duration, for example 45 ms, 1.42 s, 5 min 12 s or 3 h 20 min."""
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{number(value * 1000)}{_SPACE}ms" if value else f"0{_SPACE}s"
    if value < 60:
        return f"{number(value)}{_SPACE}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}{_SPACE}min {rest}{_SPACE}s"
    return f"{minutes // 60}{_SPACE}h {minutes % 60}{_SPACE}min"


def size(value: float | None) -> str:
    """Bytes, for example 312 B, 5.94 KiB or 1.2 GiB."""
    if value is None:
        return UNKNOWN
    scaled, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(scaled) < 1024:
            break
        scaled, unit = scaled / 1024, larger
    return f"{number(scaled)}{_SPACE}{unit}"


def moment(value: float | None) -> str:
    """Seconds since 1970 as a UTC time to the second."""
    if value is None:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def value_and_unit(shown: str) -> tuple[str, str]:
    """Split what `share`, `seconds` or `size` gave; no unit where there is none or more than one."""
    value, space, unit = shown.partition(_SPACE)
    return (value, unit) if space and " " not in unit else (shown, "")
