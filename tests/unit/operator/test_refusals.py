"""Which answers of the API server are refusals: somebody has to act, so the job's condition says them."""

from __future__ import annotations

import pytest

from tracerl_operator.shell.api import ApiError

TYPED = "failed to create typed patch object (team/canary; JobSet): .spec.x: field not declared in schema"
WEBHOOK = 'Internal error occurred: failed calling webhook "vjobset.kb.io": connection refused'


@pytest.mark.parametrize(
    ("code", "message", "passes"),
    [
        (0, "no answer", True),
        (401, "Unauthorized", True),
        (403, "exceeded quota: q", False),
        (409, "the object has been modified", True),
        (422, "spec.x: Invalid value", False),
        (429, "Too many requests", True),
        (500, "etcdserver: request timed out", True),
        (500, TYPED, False),
        (500, WEBHOOK, False),
        (503, "the server is currently unable to handle the request", True),
    ],
)
def test_what_passes_by_itself(code: int, message: str, passes: bool) -> None:
    assert ApiError(code, message).passes is passes
