"""Every type that DESIGN names, in every place: what a child sees live, and resumed in a new process."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def test_every_type_in_every_place_live_and_resumed(tmp_path: Path) -> None:
    """C7, A5: the consumer in the first process and the one in the second see what was given."""
    program, side = Path(__file__).with_name("value_table.py"), tmp_path / "side"
    for phase in ("first", "second"):
        command = [sys.executable, str(program), str(tmp_path / "values.db"), str(side), phase]
        done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
        assert done.returncode == 0, done.stderr
    seen: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in side.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        phase, place, kind, value = line.split("\t")
        seen[kind, place][phase].add(value)
    kinds = {kind for kind, _ in seen}
    assert len(kinds) >= 34
    for (kind, place), found in seen.items():
        assert found["given"] == found["first"] == found["second"], (kind, place, dict(found))
    print(f"{len(kinds)} types, {len(seen)} (type, place) pairs: given = live = resumed in all of them")
