"""The contract between the parts: the `TraceRLJob` resource, its rules, and names that parts share."""
