"""Where the objects of a job are."""

from __future__ import annotations

from tracerl.api.resolved import ResolvedJob
from tracerl.transport.objects.filesystem import FileSystem, open_filesystem


def open_objects(resolved: ResolvedJob) -> FileSystem:
    """Open the job's directory for objects. TransportError when its URL or its credentials are of no use."""
    spec = resolved.job.spec.transport
    return open_filesystem(
        resolved.records_uri,
        endpoint_url=spec.object.endpoint_url,
        deadline_seconds=spec.deadline_seconds,
    )
