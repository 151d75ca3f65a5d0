"""Spilled outputs: durable before they are named, checked when they are read, gone with their run."""

import hashlib
import os
import stat
from pathlib import Path

import pytest

from dagresume.blobs import BlobLost, BlobStore
from dagresume.errors import StoreError, StoreReadOnly

RUN = "0199a2b4-7c1e-7000-8000-000000000001"


@pytest.fixture
def blobs(db: Path) -> BlobStore:
    return BlobStore(f"{db}.blobs")


@pytest.mark.parametrize("text", ["", "x", "ü🙂\x00\n\r\n", "a" * 3_000_000])
def test_what_was_written_comes_back(blobs: BlobStore, text: str) -> None:
    name = blobs.write(RUN, text)
    assert name == hashlib.sha256(text.encode()).hexdigest()
    assert blobs.read(RUN, name) == text


def test_the_same_text_is_one_file_and_no_draft_stays(blobs: BlobStore) -> None:
    names = {blobs.write(RUN, "same") for _ in range(3)}
    assert [path.name for path in (blobs.folder / RUN).iterdir()] == list(names)


def test_files_are_for_their_owner_alone(blobs: BlobStore) -> None:
    previous = os.umask(0)
    try:
        name = blobs.write(RUN, "secret")
    finally:
        os.umask(previous)
    folder = blobs.folder / RUN
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (blobs.folder, folder, folder / name)]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("damage", [b"", b"shor", b"other", b"text\n", b"\xff\xfe\x00"])
def test_an_altered_file_is_never_read_as_if_it_were_right(blobs: BlobStore, damage: bytes) -> None:
    """B155."""
    name = blobs.write(RUN, "text")
    (blobs.folder / RUN / name).write_bytes(damage)
    with pytest.raises(BlobLost, match="altered"):
        blobs.read(RUN, name)
    blobs.write(RUN, "text")
    assert blobs.read(RUN, name) == "text"


def test_swapped_files_are_noticed(blobs: BlobStore) -> None:
    """B155."""
    first, second = blobs.write(RUN, "first"), blobs.write(RUN, "second")
    folder = blobs.folder / RUN
    (folder / first).rename(folder / "aside")
    (folder / second).rename(folder / first)
    (folder / "aside").rename(folder / second)
    for name in (first, second):
        with pytest.raises(BlobLost, match="altered"):
            blobs.read(RUN, name)


def test_a_missing_file_and_a_name_that_is_none_are_lost(blobs: BlobStore) -> None:
    for name, problem in (("0" * 64, "is gone"), ("../secret", "no valid file name")):
        with pytest.raises(BlobLost, match=problem):
            blobs.read(RUN, name)


STRANGE = [
    "run-1",
    "run-10",
    "RUN-1",
    "a_b",
    "axb",
    "A_B",
    "50%",
    "..",
    ".",
    "",
    "a/../../b",
    "x\\y",
    "\ud800",
    "ä" * 300,
]


def test_runs_never_share_a_folder_whatever_they_are_called(blobs: BlobStore) -> None:
    """B160, also on file systems that do not tell upper from lower case."""
    for run_id in STRANGE:
        blobs.write(run_id, "same")
    folders = [path for path in blobs.folder.iterdir() if path.is_dir()]
    assert len({path.name.lower() for path in folders}) == len(STRANGE)
    assert list(blobs.folder.parent.iterdir()) == [blobs.folder]


@pytest.mark.parametrize("doomed", STRANGE)
def test_removing_a_run_leaves_all_others(blobs: BlobStore, doomed: str) -> None:
    """B160: never by prefix."""
    names = {run_id: blobs.write(run_id, "same") for run_id in STRANGE}
    blobs.remove_run(doomed)
    blobs.remove_run(doomed)
    for run_id, name in names.items():
        if run_id != doomed:
            assert blobs.read(run_id, name) == "same"
    with pytest.raises(BlobLost):
        blobs.read(doomed, names[doomed])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreReadOnly, match="file/blobs"):
        BlobStore(tmp_path / "file" / "blobs").write(RUN, "x")
    with pytest.raises(StoreError, match="absent/blobs"):
        BlobStore(tmp_path / "absent" / "blobs").write(RUN, "x")


def test_a_failed_write_leaves_nothing_behind(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    blobs.write(RUN, "before")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="No space left"):
        blobs.write(RUN, "after")
    assert len(list((blobs.folder / RUN).iterdir())) == 1
