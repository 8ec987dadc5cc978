"""TraceRL."""
