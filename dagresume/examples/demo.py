"""See it survive: screen 200 résumés, kill the process after the 150th, look at the plan, go on.

    python -m dagresume.examples.demo [FOLDER]

It plays in FOLDER, or in a temporary one, with the local scorer: no model is called and no mail is sent,
whatever the environment says.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from dagresume import Decision, Engine
from dagresume.examples.resume_screening import LIMITS, workflow
from dagresume.examples.screening_model import read_ledger

RESUMES = Path(__file__).with_name("resumes")
FOREIGN = ("OPENAI_", "SMTP_", "MAIL_")  # what must not reach the demo's processes
STYLES = {"reuse": "green", "run": "yellow", "check": "cyan", "hold": "red"}
POLL = 0.005  # seconds between two looks at the ledger


@dataclass(frozen=True)
class Stage:
    """The folder in which the demo plays."""

    root: Path

    @property
    def inbox(self) -> Path:
        return self.root / "cvs"

    @property
    def ledger(self) -> Path:
        return self.root / "calls.jsonl"

    @property
    def db(self) -> Path:
        return self.root / "screening.db"

    @property
    def command(self) -> list[str]:
        """The command a user would give; both times the same."""
        module = [sys.executable, "-m", "dagresume.examples.resume_screening"]
        return [*module, str(self.inbox), "--db", str(self.db), "--out", str(self.root / "results")]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return {**kept, "DAGRESUME_CALLS_FILE": str(self.ledger)}

    def lay_out(self, count: int) -> None:
        """Fill the inbox with `count` files: the shipped résumés again and again, each time renamed."""
        self.inbox.mkdir()
        for number, source in enumerate(islice(cycle(sorted(RESUMES.glob("*.pdf"))), count), start=1):
            shutil.copyfile(source, self.inbox / f"{number:03}-{source.name}")

    def scored(self) -> int:
        """Say how many résumés have been scored so far, by the ledger and not by the database."""
        return sum(call["task"] == "score" for call in read_ledger(self.ledger))


def main(
    folder: Path | None = None, *, resumes: int = 200, kill_after: int = 150, console: Console | None = None
) -> int:
    """Play the demo; 0 if the run completed and nothing that was recorded has been paid for again.

    Files go to `folder`, which should be new or empty, and stay there; without it, to a temporary one.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return play(Stage(folder.resolve()), resumes, kill_after, console)
    with TemporaryDirectory(prefix="dagresume-demo-") as temporary:
        code = play(Stage(Path(temporary).resolve()), resumes, kill_after, console)
    console.print(
        "   (the files were in a temporary folder and are gone; `dagresume demo FOLDER` keeps them)"
    )
    return code


def play(stage: Stage, resumes: int, kill_after: int, console: Console) -> int:
    """Run, kill, plan, resume, count."""
    begun = time.perf_counter()
    stage.lay_out(resumes)
    console.print(
        f"[bold]1. Screening {resumes} résumés[/] (local deterministic scorer: nothing is really paid)"
    )
    error = run_and_kill(stage, kill_after, console)
    if error is not None:
        console.print(error, markup=False)
        return 1
    before = read_ledger(stage.ledger)
    console.print(f"   killed with SIGKILL after {stage.scored()} scores; calls paid so far: {len(before)}\n")

    console.print("[bold]2. What a resume would do, and why[/]")
    decisions = asyncio.run(plan(stage))
    console.print(plan_table(decisions))
    console.print(f"   in all: {totals(decisions)}\n")

    console.print(
        "[bold]3. The same command again, in a new process[/]: it finds the run by its key and goes on"
    )
    again = subprocess.run(
        stage.command, env=stage.environment, check=False, text=True, encoding="utf-8", capture_output=True
    )
    console.print(
        "\n".join(f"   {line}" for line in (again.stdout + again.stderr).splitlines()), markup=False
    )

    recorded = {decision.path for decision in decisions if decision.action == "reuse"}
    after = read_ledger(stage.ledger)[len(before) :]
    paths_before, paths_after = ({call["path"] for call in calls} for calls in (before, after))
    twice, lost = paths_after & recorded, (paths_before & paths_after) - recorded
    console.print("\n[bold]4. What it cost[/]")
    console.print(
        f"   calls: {len(before)} before the kill + {len(after)} after it = {len(before) + len(after)}"
    )
    console.print(f"   recorded, and paid for again: {len(twice)}")
    console.print(f"   answered, but the kill was quicker than the record, so asked again: {len(lost)}")
    console.print(f"   time: {time.perf_counter() - begun:.1f} s")
    return 1 if again.returncode or twice else 0


def run_and_kill(stage: Stage, kill_after: int, console: Console) -> str | None:
    """Start the screening and kill it without warning after `kill_after` scores; else give its output."""
    columns = (TextColumn("   scored"), BarColumn(), MofNCompleteColumn())
    with (
        subprocess.Popen(
            stage.command,
            env=stage.environment,
            text=True,
            encoding="utf-8",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as child,
        Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        bar = progress.add_task("scored", total=kill_after)
        while child.poll() is None and (scored := stage.scored()) < kill_after:
            progress.update(bar, completed=scored)
            time.sleep(POLL)
        if child.poll() is None:
            child.kill()
            return None
        return f"The screening ended before it could be killed:\n{child.communicate()[0]}"


async def plan(stage: Stage) -> list[Decision]:
    """Ask what a resume would do; nothing is executed."""
    async with Engine(str(stage.db), workflows=[workflow], limits=LIMITS) as engine:
        [run] = await engine.runs(workflow=workflow.name, key=str(stage.inbox))
        return await engine.plan(run.run_id, items=True)


def plan_table(decisions: Iterable[Decision]) -> Table:
    """Give one line for all paths of a node that share action and reason."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for decision in decisions:
        if not decision.items:  # a map's own decision sums up what its items say one by one
            node, _, index = decision.path.partition("[")
            lines.setdefault((node, str(decision.action), decision.reason), []).append(index.rstrip("]"))
    table = Table("path", "action", "paths", "why", box=None, padding=(0, 2, 0, 1))
    for (node, action, reason), indices in lines.items():
        table.add_row(
            Text(f"{node}{spans(indices)}"), action, str(len(indices)), reason, style=STYLES.get(action)
        )
    return table


def totals(decisions: Iterable[Decision]) -> str:
    """Say how many paths are reused, run or not decided yet, and how much finished work the reuse keeps."""
    single = [decision for decision in decisions if not decision.items]
    counts = Counter(str(decision.action) for decision in single)
    kept = sum(decision.seconds or 0.0 for decision in single if decision.action == "reuse")
    return f"{', '.join(f'{action} {count}' for action, count in counts.items())} ({kept:.1f} s of work kept)"


def spans(indices: list[str]) -> str:
    """Write the positions of a map's items in short: `[0–148, 150]`; nothing for a node that is no map."""
    numbers = sorted(int(index) for index in indices if index)
    groups: list[list[int]] = []
    for number in numbers:
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    written = [f"{group[0]}–{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups]
    return f"[{', '.join(written)}]" if written else ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
