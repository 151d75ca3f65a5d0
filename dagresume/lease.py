"""Keeps an engine's lease: renewed from a thread of its own, so that a body that blocks the loop does not
lose it.

What the store says of the lease is for others. For itself an engine goes by its own clock: if no renewal was
confirmed for as long as the lease lasts (the process was stopped, the store did not answer), somebody may
have taken its runs over, and it starts nothing before it has looked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from dagresume.clock import Clock
from dagresume.errors import StoreError
from dagresume.observe import log
from dagresume.store import Store

__all__ = ["Lease", "elapsed"]

LOOK: Final = 0.5  # seconds between two looks whether the engine's thread is still there

elapsed: Callable[[], float] = time.monotonic
"""Seconds on a clock that nobody turns."""
if hasattr(time, "CLOCK_BOOTTIME"):  # goes on while the machine sleeps
    elapsed = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


class Lease:
    """Renews a session's lease until `stop`, and lets the store go if the thread that opened the engine has
    ended.

    `renewed` is called, in the thread, when a renewal was confirmed after the lease had lapsed: then the
    engine has to look whether its runs are still its own, and say `prove`. `since`: when the session was
    made, from where others count. The connections' threads are no daemons: an engine that nobody closed would
    keep the interpreter from ending.
    """

    def __init__(
        self, store: Store, clock: Clock, seconds: float, renewed: Callable[[], object], since: float
    ) -> None:
        self._store, self._clock, self._seconds, self._renewed = store, clock, seconds, renewed
        self._owner = threading.current_thread()
        self._confirmed = since
        self._unproven = self._stopped = False
        self._nudge = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="dagresume lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew no more."""
        self._stopped = True
        self._nudge.set()
        self._thread.join()

    @property
    def lapsed(self) -> bool:
        """Whether others may have taken our runs over, and nobody has looked since."""
        return self._unproven or elapsed() - self._confirmed > self._seconds

    def hurry(self) -> None:
        """Renew at once."""
        self._nudge.set()

    def prove(self) -> None:
        """Say that the runs were looked at since the last renewal."""
        self._unproven = False

    def _keep(self) -> None:
        due = self._seconds / 3
        look = min(LOOK, due)
        next_at = elapsed() + due
        while True:
            hurried = self._nudge.wait(look)
            if self._stopped:
                return
            if not self._owner.is_alive():
                self._store.abandon()
                return
            self._nudge.clear()
            if hurried or elapsed() >= next_at:
                next_at = elapsed() + (due if self._renew() else look)

    def _renew(self) -> bool:
        began = elapsed()
        try:
            held = self._store.renew(self._clock.now() + round(self._seconds * 1e6))
        except StoreError as error:  # tried again in a moment; the lease outlives some failures
            if self.lapsed:
                log.warning("the lease could not be renewed and has lapsed", why=str(error))
            return False
        if held:
            self._unproven = self.lapsed  # before the next line: nobody may see neither of them
            self._confirmed = began
            if self._unproven:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    self._renewed()
        return held
