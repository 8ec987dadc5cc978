"""Found by Python through PYTHONPATH: makes a rollout take longer to encode the frames of some versions.

The work is counted, not timed: so many hashes a frame, on the thread that encodes it. What they took
there is written down, as lines of a version and seconds.
"""

import os
import sys
import time
from functools import wraps

if "tracerl.runtime.rollout_main" in sys.orig_argv:
    import xxhash

    from tracerl.engines import frames

    BLOCK = bytes(2**16)
    encode, rounds = frames.encode_frame, int(os.environ["PLANTED_ROUNDS"])

    @wraps(encode)
    def encode_frame(header, *arguments, **options):
        frame = encode(header, *arguments, **options)
        if (header.version + 1) // 2 % 2:
            started = time.thread_time()
            for _ in range(rounds):
                xxhash.xxh3_64(BLOCK)
            with open(os.environ["PLANTED_LOG"], "a") as log:  # noqa: PTH123
                log.write(f"{header.version} {time.thread_time() - started}\n")
        return frame

    frames.encode_frame = encode_frame
