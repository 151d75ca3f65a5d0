"""Measure other durable engines beside dagresume.

    python -m benchmarks.peers setup [PEER...] --envs FOLDER
    python -m benchmarks.peers run [PEER...] --envs FOLDER [--rounds 5] [--folder .] [--json FILE]

`setup` makes a virtual environment for each peer, with the versions pinned in `requirements/`; it needs the
network, for Restate also npm, for kairo Python 3.12. `run` lets dagresume and each peer run in turn, every
time in a new process with an empty folder: a chain of 1,000 steps, and a fan-out (10,000 steps of dagresume,
fewer of peers whose cost grows with the number; costs per step are compared). dagresume runs in this
interpreter.

What a peer keeps is tried and not believed: a process that has run all steps but the last kills itself, and
the next one says how many bodies ran again; calls of fsync and fdatasync are counted by strace, if it is
there. Rows of peers that lose steps are shown and count for no goal.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commit import Spread, fdatasync
from benchmarks.rows import Row, machine, show

HERE = Path(__file__).resolve().parent
OURS = "dagresume"
KEPT = 200  # steps of the run that is killed
COUNTED = (20, 120)  # steps of the two runs whose calls of fsync are counted
PATIENCE = 300.0


class PeerFailed(Exception):
    """A peer did not do what it was asked for; the message is the last line it said."""


@dataclass(frozen=True)
class Peer:
    """How an engine is run. `environment`: the folder of its virtual environment, below that of all."""

    name: str
    script: str
    environment: str
    fanout: int
    embedded: bool = True
    settings: tuple[tuple[str, str], ...] = ()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("DBOS", "run_dbos.py", "dbos", 1_000),
        Peer("LangGraph", "run_langgraph.py", "langgraph", 1_000),
        Peer(
            "LangGraph-functional",
            "run_langgraph.py",
            "langgraph",
            1_000,
            settings=(("LANGGRAPH_API", "functional"),),
        ),
        Peer("kairo", "run_kairo.py", "kairo", 1_000),
        Peer("Restate", "run_restate.py", "restate", 1_000, embedded=False),
    )
}
DAGRESUME = Peer(OURS, "run_dagresume.py", "", 10_000)


@dataclass(frozen=True)
class Kept:
    """What was seen of a peer's durability."""

    again: int | None  # steps that ran again of KEPT, after the process was killed in the last one
    syncs: float | None  # per step of a chain

    @property
    def durable(self) -> bool:
        return self.again == 0

    def __str__(self) -> str:
        again = "not tried" if self.again is None else f"{self.again} of {KEPT} steps ran again after a kill"
        return f"{again}, {'fsyncs not counted' if self.syncs is None else f'{self.syncs:.2f} fsyncs a step'}"


def interpreter(peer: Peer, environments: Path) -> Path:
    """Give the Python that runs a peer."""
    if not peer.environment:
        return Path(sys.executable)
    return environments.resolve() / peer.environment / "bin" / "python"


def surroundings(peer: Peer, environments: Path) -> dict[str, str]:
    found = {**os.environ, **dict(peer.settings)}
    if not peer.environment:
        found["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    # The program itself: what npm calls by that name starts it and does not end it.
    servers = (environments.resolve() / "restate" / "server").glob("**/*-linux-*/bin/restate-server")
    return found | {"RESTATE_SERVER": str(server) for server in servers}


def once(
    command: list[str], surrounding: Mapping[str, str], *, patience: float = PATIENCE, dies: bool = False
) -> dict[str, Any]:
    """Run a script in a process group of its own and give what it tells; PeerFailed if it does not.

    `dies`: it is to kill itself, and tells nothing.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(surrounding),
        text=True,
        start_new_session=True,
    )
    try:
        out, told = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"it took more than {patience:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started ends with it
        process.wait()
    lines = out.strip().splitlines()
    if dies and process.returncode:
        return {}
    if process.returncode or not lines or not lines[-1].startswith("{"):
        said = told.strip().splitlines() or ["it said nothing"]
        raise PeerFailed(f"exit {process.returncode}: {said[-1]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


class Stand:
    """Where peers are run: their environments, and a folder on the disk that is measured."""

    def __init__(self, environments: Path, folder: Path) -> None:
        self.environments, self.folder = environments, folder

    def call(
        self,
        peer: Peer,
        work: str,
        steps: int,
        place: str,
        *,
        before: tuple[str, ...] = (),
        dies: bool = False,
    ) -> dict[str, Any]:
        script = [str(interpreter(peer, self.environments)), str(HERE / peer.script), work, str(steps), place]
        return once([*before, *script], surroundings(peer, self.environments), dies=dies)

    def run(self, peer: Peer, work: str, steps: int, before: tuple[str, ...] = ()) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(
            dir=self.folder, prefix=".peer-", ignore_cleanup_errors=True
        ) as place:
            return self.call(peer, work, steps, place, before=before)

    def kept(self, peer: Peer) -> Kept:
        """Try what a peer keeps."""
        again: int | None = None
        with tempfile.TemporaryDirectory(
            dir=self.folder, prefix=".peer-", ignore_cleanup_errors=True
        ) as place:
            self.call(peer, "resume", KEPT, place, dies=True)
            if (Path(place) / "killed").exists():
                again = int(self.call(peer, "resume", KEPT, place)["ran"])
        return Kept(again, self._syncs(peer))

    def _syncs(self, peer: Peer) -> float | None:
        if shutil.which("strace") is None:
            return None
        few, many = (self._count(peer, steps) for steps in COUNTED)
        return (many - few) / (COUNTED[1] - COUNTED[0])

    def _count(self, peer: Peer, steps: int) -> int:
        with tempfile.NamedTemporaryFile(dir=self.folder) as found:
            traced = ("strace", "-f", "-qq", "-e", "trace=fsync,fdatasync", "-o", found.name)
            self.run(peer, "chain", steps, before=traced)
            calls = Path(found.name).read_text(encoding="utf-8", errors="replace").splitlines()
        return sum(bool(re.search(r"\b(fsync|fdatasync)\(", call)) for call in calls)


def measured(stand: Stand, peers: list[Peer], rounds: int) -> tuple[list[Row], list[str]]:
    """Give a row for each work and peer, and what went wrong with those that have none."""
    kept: dict[str, Kept] = {}
    failed: dict[str, str] = {}
    for peer in (DAGRESUME, *peers):
        try:
            kept[peer.name] = stand.kept(peer)
        except PeerFailed as error:
            failed[peer.name] = str(error)
    rows = []
    for work, limit in (("chain", 7.0), ("fanout", 50.0)):
        samples: dict[str, list[dict[str, Any]]] = {}
        for _ in range(rounds):
            for peer in (DAGRESUME, *peers):
                if peer.name in failed:
                    continue
                steps = 1_000 if work == "chain" else peer.fanout
                try:
                    samples.setdefault(peer.name, []).append(stand.run(peer, work, steps))
                except PeerFailed as error:
                    failed[peer.name] = f"{work} of {steps:,}: {error}"
        ours = samples.pop(OURS)
        for name, taken in samples.items():
            if name in failed:
                continue
            goal = 4.0 if work == "chain" and not PEERS[name].embedded else limit
            rows.append(row(work, PEERS[name], ours, taken, goal, kept[name]))
    return rows, [f"{name}: {why}" for name, why in failed.items()]


def row(
    work: str,
    peer: Peer,
    ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    goal: float,
    kept: Kept,
) -> Row:
    """Give the row of one peer: our cost over its cost, which is to be at most 1/`goal`."""
    pairs = [a["us"] / b["us"] for a, b in zip(ours, theirs, strict=False)]
    versions = f"{peer.name} {theirs[0]['version']} on Python {theirs[0]['python']}"
    steps = "1,000" if work == "chain" else f"{DAGRESUME.fanout:,} (the peer: {peer.fanout:,})"
    return Row(
        "peers",
        f"{work} of {steps}",
        versions,
        1 / goal,
        Spread.of(pairs),
        ours=Spread.of([each["us"] for each in ours]),
        theirs=Spread.of([each["us"] for each in theirs]),
        figures="µs per step",
        rounds=len(pairs),
        durability=f"{peer.name}: {kept}",
        note=f"{1 / Spread.of(pairs).median:.1f} times as fast"
        + ("" if kept.durable else "; not durable, so it counts for no goal"),
    )


def set_up(peers: list[Peer], environments: Path) -> None:
    """Make the environment of each of these peers."""
    for name in dict.fromkeys(peer.environment for peer in peers):
        place = environments / name
        python = (
            shutil.which("python3.12") if name == "kairo" and sys.version_info < (3, 12) else sys.executable
        )
        if python is None:
            print(f"{name}: needs Python 3.12, and python3.12 is not found")
            continue
        subprocess.run([python, "-m", "venv", str(place)], check=True)
        wanted = HERE / "requirements" / f"{name}.txt"
        subprocess.run([str(place / "bin" / "pip"), "install", "-q", "-r", str(wanted)], check=True)
        if name == "restate":
            (place / "server").mkdir(exist_ok=True)
            command = ["npm", "install", "--silent", "@restatedev/restate-server@1.7.12"]
            subprocess.run(command, check=True, cwd=place / "server")
        print(f"{name}: ready in {place}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.peers"
    )
    parser.add_argument("what", choices=["setup", "run"])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"{', '.join(PEERS)} (default: all)")
    parser.add_argument("--envs", type=Path, required=True, help="where their environments are")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where the databases are made (default .)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows into FILE")
    options = parser.parse_args()
    unknown = [name for name in options.peers if name not in PEERS]
    if unknown:
        parser.error(f"no peer {unknown[0]!r}: choose from {', '.join(PEERS)}")
    peers = [PEERS[name] for name in options.peers or PEERS]
    if options.what == "setup":
        set_up(peers, options.envs)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        fsync = fdatasync(Path(place)).microseconds
    print("  ".join(f"{name} {value}" for name, value in machine(options.folder).items()))
    print(f"append + fdatasync {fsync:.0f} µs")
    rows, failed = measured(Stand(options.envs, options.folder), peers, options.rounds)
    show(rows)
    for line in failed:
        print(f"failed  {line}")
    if options.json:
        data = {"machine": machine(options.folder) | {"fdatasync_us": fsync}, "failed": failed}
        data["rows"] = [each.told() for each in rows]
        options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
