"""Times as Kubernetes writes them: whole seconds of UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def show_time(time: datetime) -> str:
    """Write a time as metav1.Time."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: object) -> datetime | None:
    """Read a metav1.Time; None where it is none."""
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def later(time: datetime, by: timedelta) -> datetime | None:
    """Give a later time; None where it is after the end of all calendars."""
    try:
        return time + by
    except OverflowError:
        return None
