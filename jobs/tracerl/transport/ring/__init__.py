"""The shared-memory ring: segments in one mapped file, a store process that keeps the books, and its clients.

A producer leases a segment and appends frames to it by itself; a one-way message commits them. Readers pin
frames and read them in place. Everything that must survive a killed process, or end with it, is known to the
store alone and hangs on its connections: there are no atomics and no locks in shared memory.
"""
