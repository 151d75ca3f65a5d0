"""Measure other durable engines beside dagresume.

    python -m benchmarks.peers setup [PEER...] --envs FOLDER
    python -m benchmarks.peers run [PEER...] --envs FOLDER [--rounds 5] [--folder .] [--json FILE]

`setup` makes a virtual environment for each peer, with the versions pinned in `requirements/`; it needs the
network, for Restate also npm, for kairo Python 3.12. `run` lets dagresume and each peer run in turn, every
time in a new process with an empty folder: a chain of 1,000 steps, and a fan-out (10,000 steps of dagresume,
fewer of peers whose cost grows with the number; costs per step are compared). dagresume runs in this
interpreter.

What a peer keeps is tried and not believed: a process is killed by SIGKILL in the last step of a chain and
in the step that joins a fan-out, and the next one says how many bodies ran again; calls of fsync and
fdatasync are counted by strace, if it is there, and the journal mode is read from the database. Rows of peers
that lose steps are shown and count for no goal. A work that failed or took too long is told with the peer's
last line.

--json writes `machine`, `rows` (as `benchmarks.rows.Row.told`: work, against, goal, measured, ours, theirs,
rounds, durability, python, note) and `failed` (work, against, error).
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.commit import fdatasync
from benchmarks.peers.disk import PerStep, Seen, seen
from benchmarks.rows import Row, machine, show, told
from dagresume.bench import Spread

HERE = Path(__file__).resolve().parent
OURS = "dagresume"
CHAIN = 1_000
KEPT = 200  # steps of the run that is killed
COUNTED = (20, 120)  # steps of the two runs whose calls of fsync are counted
PATIENCE = 300.0
TRIALS = ("chain", "fanout")  # works that are killed and taken up again
GOALS = {"chain": 7.0, "fanout": 50.0}
SERVER_GOAL = 4.0  # chain, against an engine that is a server


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

    again: Mapping[str, int]  # bodies of KEPT that ran again after a kill, for each work that was tried
    disk: PerStep | None = None  # in a chain

    @property
    def durable(self) -> bool:
        return self.again.keys() == set(TRIALS) and not any(self.again.values())

    def __str__(self) -> str:
        again = [f"{self.again.get(work, 'an unknown number')} in a {work}" for work in TRIALS]
        counted = "fsyncs not counted" if self.disk is None else str(self.disk)
        return f"of {KEPT} finished steps {' and '.join(again)} ran again after a kill; {counted}"


@dataclass(frozen=True)
class Failure:
    """A work that a peer did not do, and the last line it said."""

    work: str
    against: str
    error: str

    def __str__(self) -> str:
        return f"{self.against}, {self.work}: {self.error}"


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
    server = next(servers, None)
    return found if server is None else found | {"RESTATE_SERVER": str(server)}


def once(
    command: list[str], surrounding: Mapping[str, str], *, patience: float = PATIENCE, dies: bool = False
) -> dict[str, Any]:
    """Run a script in a process group of its own and give what it tells; PeerFailed if it does not.

    `dies`: it is to kill itself, and tells nothing.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(surrounding),
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, told = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"it took more than {patience:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started ends with it
    lines = out.strip().splitlines()
    if dies and process.returncode == -signal.SIGKILL:
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
        return Kept({work: self._again(peer, work) for work in TRIALS}, self._disk(peer))

    def _again(self, peer: Peer, work: str) -> int:
        """Give how many of KEPT finished steps ran again after a kill in the step that followed them."""
        steps = KEPT + (work == "chain")  # the last of a chain is the one that is killed
        with tempfile.TemporaryDirectory(
            dir=self.folder, prefix=".peer-", ignore_cleanup_errors=True
        ) as place:
            self.call(peer, f"resume-{work}", steps, place, dies=True)
            if not (Path(place) / "killed").exists():
                raise PeerFailed("it ended before it was killed")
            ran = int(self.call(peer, f"resume-{work}", steps, place)["ran"])
        return ran - (work == "chain")

    def _disk(self, peer: Peer) -> PerStep | None:
        if shutil.which("strace") is None:
            return None
        short, long = (self._seen(peer, steps) for steps in COUNTED)
        return PerStep.between(short, long, COUNTED[1] - COUNTED[0])

    def _seen(self, peer: Peer, steps: int) -> Seen:
        with (
            tempfile.NamedTemporaryFile(dir=self.folder) as found,
            tempfile.TemporaryDirectory(
                dir=self.folder, prefix=".peer-", ignore_cleanup_errors=True
            ) as place,
        ):
            traced = ("strace", "-f", "-y", "-qq", "-e", "trace=fsync,fdatasync", "-o", found.name)
            self.call(peer, "chain", steps, place, before=traced)
            return seen(Path(found.name).read_text(encoding="utf-8", errors="replace"), Path(place))


def measured(
    stand: Stand, peers: list[Peer], rounds: int, ours: Peer = DAGRESUME
) -> tuple[list[Row], list[Failure]]:
    """Give a row for each work and peer, and what went wrong with those that have none."""
    kept: dict[str, Kept] = {}
    failures: list[Failure] = []
    for peer in (ours, *peers):
        try:
            kept[peer.name] = stand.kept(peer)
        except PeerFailed as error:
            kept[peer.name] = Kept({})  # it is measured all the same, and counts for nothing
            failures.append(Failure("kill and resume", peer.name, str(error)))
    rows = []
    for work in GOALS:
        samples, failed = interleaved(stand, (ours, *peers), work, rounds)
        failures += failed
        if ours.name in samples:
            rows += [
                row(work, peer, samples[ours.name], samples[peer.name], kept[peer.name])
                for peer in peers
                if peer.name in samples
            ]
    return rows, failures


def interleaved(
    stand: Stand, peers: tuple[Peer, ...], work: str, rounds: int
) -> tuple[dict[str, list[dict[str, Any]]], list[Failure]]:
    """Let each peer run once a round; one that fails has no samples, and is not asked again."""
    samples: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
    failures = []
    for _ in range(rounds):
        for peer in peers:
            if peer.name not in samples:
                continue
            steps = CHAIN if work == "chain" else peer.fanout
            try:
                samples[peer.name].append(stand.run(peer, work, steps))
            except PeerFailed as error:
                failures.append(Failure(f"{work} of {steps:,}", peer.name, str(error)))
                del samples[peer.name]
    return samples, failures


def row(
    work: str,
    peer: Peer,
    ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    kept: Kept,
) -> Row:
    """Give the row of one peer: our cost over its cost, which is to be at most one part in the goal."""
    pairs = [a["us"] / b["us"] for a, b in zip(ours, theirs, strict=True)]
    goal = GOALS[work] if peer.embedded or work != "chain" else SERVER_GOAL
    versions = f"{peer.name} {theirs[0]['version']} on Python {theirs[0]['python']}"
    steps = f"{CHAIN:,}" if work == "chain" else f"{DAGRESUME.fanout:,} (the peer: {peer.fanout:,})"
    return Row(
        "run --envs FOLDER",
        f"{work} of {steps}",
        versions,
        round(1 / goal, 4),
        Spread.of(pairs),
        ours=Spread.of([each["us"] for each in ours]),
        theirs=Spread.of([each["us"] for each in theirs]),
        figures="µs per step",
        rounds=len(pairs),
        durability=f"{peer.name}: {kept}",
        note=f"{1 / Spread.of(pairs).median:.1f} times as fast"
        + ("" if kept.durable else "; not durable, so it counts for no goal"),
        module="benchmarks.peers",
        counts=kept.durable,
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
    for failure in failed:
        print(f"failed  {failure}")
    if options.json:
        data = told(rows, options.folder, fsync) | {"failed": [asdict(each) for each in failed]}
        options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
