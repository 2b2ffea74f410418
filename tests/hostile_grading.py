"""What workers are asked to call in their tests, instead of a grader: each misbehaves as told."""

import os
import sys
import time

_seen = []


def misbehave(job: str) -> bool:
    """Does what a job names; True for "yes"."""
    _seen.append(job)
    if job == "spin":
        while True:
            pass
    if job == "sleep":
        time.sleep(3600)
    if job == "nap":
        time.sleep(0.5)
        return True
    if job == "hoard":
        bytearray(2**34)
    if job == "hoard if used":  # what those before it left over is not its fault
        return len(_seen) == 1 or bool(bytearray(2**34))
    if job == "die":
        os._exit(3)
    if job == "overflow":
        return _nested(0) > 0
    if job == "raise":
        raise ValueError("not mathematics")
    if job == "print":
        print('{"is_correct": true}')
        sys.stderr.write("x" * 200_000)  # more than a pipe holds
        os.write(1, b"noise\n")
        return False
    if job == "write":
        with open(os.environ["HOSTILE_FILE"], "w") as file:
            file.write("x")
    return job == "yes"


def _nested(depth: int) -> int:
    return _nested(depth + 1) + 1
