"""What trainer 0 says about itself, read as the claim of someone who may lie or be broken.

The config map's one key is text of a bounded size that must be a `Progress` of plausible numbers; all else is
as if nothing was said. Nothing here decides how a job ends: only pods do that.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from pydantic import ValidationError

from tracerl.api.job import INT32_MAX, Progress
from tracerl.api.pods import PROGRESS_KEY
from tracerl_operator.times import parse_time, show_time
from tracerl_operator.types import Document

MOST_BYTES = 4096
INTERVAL = timedelta(seconds=10)
"""Status is written for the sake of progress at most this often."""


def claimed(progress_map: Document | None, steps: int) -> Progress | None:
    """Read the claim of a job of that many steps; None where there is none that could be true."""
    data = (progress_map or {}).get("data")
    text = data.get(PROGRESS_KEY) if isinstance(data, dict) else None
    if not isinstance(text, str):
        return None
    try:
        if len(text.encode()) > MOST_BYTES:
            return None
        progress = Progress.model_validate_json(text, strict=True)
    except (ValidationError, UnicodeEncodeError):
        return None
    if not (0 <= progress.step <= steps and 0 <= progress.policy_version <= INT32_MAX):
        return None
    return progress.model_copy(update={"steps": steps, "updated_at": None})


def mirrored(
    shown: Progress, claim: Progress | None, now: datetime, *, final: bool
) -> tuple[Progress, datetime | None]:
    """Give the progress to show, and when to look again where a newer claim has to wait.

    `updatedAt` is the operator's own time. `final` is for the last look at a job that ended, which does not
    wait.
    """
    if claim is None or claim == shown.model_copy(update={"updated_at": None}):
        return shown, None
    last = parse_time(shown.updated_at)
    # A time in the future is of another clock: waiting for it could take for ever.
    if not final and last is not None and now - INTERVAL < last <= now:
        return shown, last + INTERVAL
    return claim.model_copy(update={"updated_at": show_time(now)}), None
