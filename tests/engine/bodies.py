"""What worker processes import: nothing heavy, since the time it takes counts."""

import time


def nap(n: int) -> int:
    """Take a while."""
    time.sleep(0.15)
    return n
