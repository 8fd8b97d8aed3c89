"""Eight writers, killed at random: ``disk_writers.py DIRECTORY SECONDS NAME...``"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time

import values

from lmcache_connector.storage.tiers.disk import DiskTier

NUM_WRITERS = 8
SIZES = [1000, 300_000]
NUM_CONTENTS = 4


def start_writer(directory: str, names: list[str]) -> int:
    """Returns the process id of one that writes until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    os.nice(5)  # or they leave no time to those who kill and read
    tier = DiskTier(directory, None)
    rng = random.Random(os.getpid())
    for _ in itertools.count():
        values.put_value(tier, rng.choice(names), SIZES, rng.randrange(NUM_CONTENTS))
    return 0


def main(directory: str, seconds: str, *names: str) -> None:
    rng = random.Random(5)
    writers = [start_writer(directory, list(names)) for _ in range(NUM_WRITERS)]
    end = time.monotonic() + float(seconds)
    num_kills = 0
    while writers:
        time.sleep(0.002)
        pid = writers.pop(rng.randrange(len(writers)))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "a writer has ended by itself"
        num_kills += 1
        if time.monotonic() < end:
            writers.append(start_writer(directory, list(names)))
    print(num_kills)


if __name__ == "__main__":
    main(*sys.argv[1:])
