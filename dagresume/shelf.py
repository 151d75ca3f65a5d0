"""What is stored of runs as values: outputs in the store or in blobs, inputs, and what of them is secret."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio

from dagresume import codec
from dagresume.blobs import BlobLost, BlobStore
from dagresume.errors import INPUTS, CheckpointLost
from dagresume.events import RUN_CLAIMED, RUN_CREATED, Record, Records, Snapshot
from dagresume.masks import NO_SECRETS, Mask
from dagresume.results import Stored
from dagresume.store import Loaded, Store

__all__ = ["Shelf"]


class Shelf:
    """The stored values of an engine's runs. `blobs` None: there are no files, and nothing is spilled."""

    def __init__(self, store: Store, blobs: BlobStore | None) -> None:
        self._store, self._blobs = store, blobs

    async def spill(self, run_id: str, text: str) -> str:
        """Put a big text into a blob; gives its name once it is durable."""
        assert self._blobs is not None
        return await anyio.to_thread.run_sync(self._blobs.write, run_id, text)

    async def fetch(self, run_id: str, places: Sequence[Stored | Record]) -> list[str]:
        """Give packed outputs from the store and from blobs, their digests checked; CheckpointLost names the
        path. A record is to hold its own output.
        """
        texts = await self._store.output(_seqs(places))
        if len(texts) < len(places):  # the others are in files
            return await anyio.to_thread.run_sync(self._put_together, run_id, places, texts)
        return self._put_together(run_id, places, texts)

    def fetch_now(self, run_id: str, places: Sequence[Stored | Record]) -> list[str]:
        """Do the same without an event loop, from any thread."""
        return self._put_together(run_id, places, self._store.output_now(_seqs(places)))

    def _put_together(
        self, run_id: str, places: Sequence[Stored | Record], texts: list[str | None]
    ) -> list[str]:
        if len(texts) < len(places):
            rest = iter(texts)
            texts = [
                next(rest) if (name := _blob(place)) is None else self._read(run_id, place, name)
                for place in places
            ]
        if None in texts:
            raise CheckpointLost(run_id, places[texts.index(None)].path or "", "is missing")
        found: list[str] = texts  # type: ignore[assignment]  # none of them is None
        told = places.column("digest") if isinstance(places, Records) else [p.digest for p in places]
        digests = list(map(codec.digest, found))
        if digests != told:
            self._refuse_altered(run_id, places, digests)
        return found

    @staticmethod
    def _refuse_altered(run_id: str, places: Sequence[Stored | Record], digests: Sequence[bytes]) -> None:
        for place, digest in zip(places, digests, strict=True):
            if place.digest and digest != place.digest:
                raise CheckpointLost(run_id, place.path or "", "was altered: its checksum does not match")

    def _read(self, run_id: str, place: Stored | Record, name: str) -> str:
        assert self._blobs is not None
        try:
            return self._blobs.read(run_id, str(name))  # what the store says may be anything
        except BlobLost as error:
            raise CheckpointLost(run_id, place.path or "", str(error)) from error

    async def inputs(self, loaded: Loaded) -> dict[str, tuple[str, bytes]]:
        """Give a stored run's inputs, each packed as it was, and the digests they were compared by."""
        text, blob = _given(loaded)
        if blob is not None:
            (text,) = await self.fetch(loaded.row.run_id, [blob])
        digests = loaded.records[0].facts.get("inputs", {}) if loaded.records else {}
        packed = codec.members(text)
        return {name: (value, bytes.fromhex(digests.get(name, ""))) for name, value in packed.items()}

    def mask(self, loaded: Loaded, secrets: frozenset[str]) -> Mask:
        """Give what hides the secrets of a stored run: those that it was driven with, and `secrets`. Its
        inputs are read when something is to be hidden.
        """
        names = Snapshot(r for r in loaded.records if r.kind in {RUN_CREATED, RUN_CLAIMED}).secrets | secrets
        return Mask(names, partial(self.packed_inputs, loaded)) if names else NO_SECRETS

    def packed_inputs(self, loaded: Loaded) -> dict[str, str]:
        text, blob = _given(loaded)
        if blob is not None:
            (text,) = self.fetch_now(loaded.row.run_id, [blob])
        return codec.members(text)


def _blob(place: Stored | Record) -> str | None:
    return place.blob if type(place) is Stored else None


def _seqs(places: Sequence[Stored | Record]) -> list[int]:
    """Give the records that hold these outputs, without those that are in files."""
    if isinstance(places, Records):
        return places.column("seq")
    return [place.seq or 0 for place in places if _blob(place) is None]


def _given(loaded: Loaded) -> tuple[str, Stored | None]:
    """Give the packed inputs of a run, or where they are."""
    facts = loaded.records[0].facts if loaded.records else {}
    blob = Stored(INPUTS, 0, b"", facts["inputs_blob"]) if "inputs_blob" in facts else None
    return loaded.row.inputs or "{}", blob
