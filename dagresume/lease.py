"""Keeps an engine's lease: renewed from a thread of its own, so that a body that blocks the loop does not
lose it.
"""

from __future__ import annotations

import threading

from dagresume.clock import Clock
from dagresume.errors import StoreError
from dagresume.store import Store

__all__ = ["Lease"]

LOOK = 0.5  # seconds between two looks whether the engine's thread is still there


class Lease:
    """Renews a session's lease until `stop`, and lets the store go if the thread that opened the engine has
    ended.

    The connections' threads are no daemons: an engine that nobody closed would keep the interpreter from
    ending.
    """

    def __init__(self, store: Store, clock: Clock, seconds: float) -> None:
        self._store, self._clock, self._seconds = store, clock, seconds
        self._owner = threading.current_thread()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="dagresume lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew no more."""
        self._stop.set()
        self._thread.join()

    def _keep(self) -> None:
        due = self._seconds / 3
        waited = 0.0
        look = min(LOOK, due)
        while not self._stop.wait(look):
            if not self._owner.is_alive():
                self._store.abandon()
                return
            waited += look
            if waited >= due:
                waited = 0.0
                self._renew()

    def _renew(self) -> None:
        try:
            self._store.renew(self._clock.now() + round(self._seconds * 1e6))
        except StoreError:  # tried again in a moment; the lease outlives two failures
            return
