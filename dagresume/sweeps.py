"""Kills a process at every point there is, lets new ones go on, and says what was wrong afterwards."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Literal

from dagresume import codec
from dagresume.killpoints import COMMITS, FILES, STATEMENTS, Point, Where
from dagresume.plays import Effects, find_mark, marked_piece
from dagresume.stages import Case, Check, Scene, Stage
from dagresume.zygote import Zygote

__all__ = ["Points", "Sweep", "sweep", "sweep_action", "sweep_marked"]

Points = Literal["all", "commits", "statements", "files"] | Iterable[Point]
_GROUPS: Final[Mapping[str, tuple[Where, ...]]] = {
    "all": (*COMMITS, *FILES, *STATEMENTS),
    "commits": COMMITS,
    "statements": STATEMENTS,
    "files": FILES,
}


@dataclass
class Sweep:
    """What a sweep found. `undisturbed` is the run that nothing happened to; str() is a table."""

    target: str
    undisturbed: Case
    cases: list[Case]
    seconds: float = 0.0

    @property
    def violations(self) -> list[str]:
        """What should not have been, with the points that led to it."""
        return [f"{case}: {text}" for case in [self.undisturbed, *self.cases] for text in case.violations]

    @property
    def refused(self) -> int:
        """How many runs needed a person's word."""
        return sum(case.refused > 0 for case in self.cases)

    @property
    def kills(self) -> Counter[Where]:
        """How many processes were killed at each kind of point."""
        return Counter(point.where for case in self.cases for point in case.points[: case.killed])

    def __str__(self) -> str:
        killed = [case for case in self.cases if case.killed]
        columns = {
            "commits": self.undisturbed.commits,
            "statements": self.undisturbed.statements,
            "kill points": len(self.cases),
            "killed": len(killed),
            "twice": sum(case.killed > 1 for case in killed),
            "not reached": len(self.cases) - len(killed),
            "never made": sum(not case.created for case in killed),
            "refused": self.refused,
            "resumed": sum(case.created and not case.refused for case in killed),
            "violations": len(self.violations),
            "seconds": round(self.seconds, 1),
        }
        widths = [max(len(name), len(str(value))) for name, value in columns.items()]
        rows = (columns.keys(), columns.values())
        lines = ["  ".join(str(c).rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self.target, *lines])

    def check(self) -> None:
        """Raise AssertionError with everything that should not have been."""
        if self.violations:
            raise AssertionError("\n".join([str(self), *self.violations]))


# -- sweeps ---------------------------------------------------------------------------------------------


def sweep(
    target: str,
    inputs: Mapping[str, Any] | None = None,
    db_dir: str | os.PathLike[str] = "crashes",
    points: Points = "all",
    *,
    again: Iterable[Point] = (),
    every: int = 1,
    setup: str | None = None,
    effects: Effects | None = None,
    varying: Iterable[str] = (),
    check: Check | None = None,
    options: Mapping[str, Any] | None = None,
    processes: int = 2,
    timeout: float = 30.0,
) -> Sweep:
    """Kill a workflow at every point, let a new process go on, and give what was wrong.

    `target`: a reference (`package.module:attribute`, `path/file.py:attribute`) to a Workflow or a function
    that gives one. It is run once undisturbed, which counts its points; then once for each of them, in a
    folder of its own below `db_dir` that is the working folder of its processes (folders without a violation
    are removed). `points`: "commits" (before and after each), "statements" (of SQL), "files" (while a big
    output is written, and files are removed), "all", or Points. `again`: after these points the process that
    goes on is killed too, at every point of its own. `every`: take only each n-th statement. `setup`: a
    reference to a function that is called in each process before its engine is made. `check`: is given the
    folder of each run when it has ended, and gives what is wrong there. `options`: those of `Engine`.

    `effects`: a file in the working folder with a line for each effect on the outside world, or a reference
    to a function that lists them, given the folder. Each must then happen as often as in the undisturbed run.
    A run that stops as uncertain is gone on with as by a person who looks: a path whose effects are there is
    resolved, another is retried. `varying`: nodes whose outputs are not the same in each run.

    What it looks at, with plain SQL and a file that notes each body as it begins, wherever a process died or
    ended: no body of a non-idempotent path began without its durable start record; none began before what it
    depends on was durable; no result was given before the run's end was; `resume` refuses exactly the paths
    that began and are not known to have ended, else it goes on, and `retry` after a refusal; completed paths
    never begin again; outputs and the final state of every path are those of the undisturbed run. Graphs
    inside nodes and rounds of loops are looked at as well. What the run waits for comes: its processes
    approve what is to be approved and send the events it waits for (their payload is None).
    """
    source = {
        "target": target,
        "setup": setup,
        "inputs": codec.pack(None if inputs is None else dict(inputs)),
        "effects": effects,
    }
    if not isinstance(effects, str | None):
        raise TypeError(f"effects={effects!r}: a file name, or a reference 'module:function'")
    stage = Stage(source, effects, varying, options, check, db_dir, timeout)
    imports = [target, *([setup] if setup else [])]
    return _swept(target, stage, imports, points, again, every, processes)


def sweep_marked(
    module: Any,
    owner: str,
    name: str,
    db_dir: str | os.PathLike[str],
    *,
    statements: bool = False,
    files: bool = False,
    every: int = 1,
    varying: Iterable[str] = (),
    check: Check | None = None,
    processes: int = 2,
    timeout: float = 30.0,
    workflow: object = None,
    inputs: object = None,
    effects: object = None,
    setup: object = None,
    options: object = None,
) -> Sweep:
    """Do as `sweep` does with what a mark of this name says: objects, not references.

    The mark is the one of the function, class or ("") module that `owner` names in the module. `workflow`,
    `inputs`, `effects`, `setup` and `options` are not taken from here: every process imports the module and
    finds them at the mark.
    """
    piece = marked_piece(find_mark(module, owner, name))
    where = {"module": module.__name__, "file": module.__file__, "owner": owner, "mark": name}
    stage = Stage(where, piece.effects, varying, None, check, db_dir, timeout)
    points = [*COMMITS, *(FILES if files else ()), *(STATEMENTS if statements else ())]
    imports = [(module.__name__, module.__file__)]
    return _swept(f"{module.__name__}:{owner}", stage, imports, points, (), every, processes)


def _swept(
    target: str,
    stage: Stage,
    imports: Sequence[str | tuple[str, str]],
    points: Points | Sequence[Where],
    again: Iterable[Point],
    every: int,
    processes: int,
) -> Sweep:
    """Play a piece at all of these points; `imports` are for the processes that fork the others."""
    began = time.monotonic()
    with _company(imports, processes) as lend:
        with lend() as zygote:
            undisturbed = stage.rehearse(zygote)
        if undisturbed.violations:
            return Sweep(target, undisturbed, [], time.monotonic() - began)
        cases = _played(lend, stage.play, undisturbed, points, again, every, processes)
    return Sweep(target, undisturbed, cases, time.monotonic() - began)


def sweep_action(
    action: str,
    db_dir: str | os.PathLike[str] = "crashes",
    points: Points = "all",
    *,
    before: str | None = None,
    workflows: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    again: Iterable[Point] = (),
    every: int = 1,
    setup: str | None = None,
    check: Check | None = None,
    options: Mapping[str, Any] | None = None,
    processes: int = 2,
    timeout: float = 30.0,
) -> Sweep:
    """Kill a process that does something with an engine (recovers, prunes, migrates …) at every point.

    `action`: a reference to a function, plain or async, that is given the engine on the database of its
    working folder and what is in `arguments` (JSON), and gives what came of it (JSON). After a kill it is
    called again in a new process, until it returns: what it gives, and the final state of every path of the
    newest run, must then be as they are when nothing happens. `before`: a reference to a function that is
    called once with the same arguments, in a process of its own, which may die; what it leaves in its working
    folder is where every case begins. `workflows`: references to those that the engine knows. The rest is as
    in `sweep`.
    """
    began = time.monotonic()
    order = {
        "action": action,
        "workflows": list(workflows),
        "setup": setup,
        "options": dict(options or {}),
        "arguments": dict(arguments or {}),
    }
    stage = Scene(order, before, check, db_dir, timeout)
    imports = [each for each in (action, before, setup, *workflows) if each]
    with _company(imports, processes) as lend:
        with lend() as zygote:
            undisturbed = stage.rehearse(zygote)
        cases: list[Case] = []
        if not undisturbed.violations:
            cases = _played(lend, stage.play, undisturbed, points, again, every, processes)
    stage.clear()
    return Sweep(action, undisturbed, cases, time.monotonic() - began)


Lend = Callable[[], contextlib.AbstractContextManager[Zygote]]


@contextlib.contextmanager
def _company(imports: Sequence[str | tuple[str, str]], processes: int) -> Iterator[Lend]:
    """Give a function that lends one of so many zygotes, for one thread at a time."""
    with contextlib.ExitStack() as stack:
        zygotes: SimpleQueue[Zygote] = SimpleQueue()
        for _ in range(processes):
            zygotes.put(stack.enter_context(Zygote(*imports)))

        @contextlib.contextmanager
        def lend() -> Iterator[Zygote]:
            zygote = zygotes.get()
            try:
                yield zygote
            finally:
                zygotes.put(zygote)

        yield lend


def _played(
    lend: Lend,
    play: Callable[[Zygote, tuple[Point, ...]], Case],
    undisturbed: Case,
    points: Points | Sequence[Where],
    again: Iterable[Point],
    every: int,
    processes: int,
) -> list[Case]:
    def at(where: tuple[Point, ...]) -> Case:
        with lend() as zygote:
            return play(zygote, where)

    with ThreadPoolExecutor(processes) as pool:
        cases = list(pool.map(at, [(point,) for point in _points(points, undisturbed, every)]))
        for point in again:
            after = at((point,))
            cases += pool.map(at, [(point, second) for second in _points("all", after, every)])
    return cases


def _points(which: Points | Sequence[Where], case: Case, every: int) -> list[Point]:
    """Give the points of a process that did what the last one of this case did."""
    if isinstance(which, str) and which not in _GROUPS:
        raise ValueError(f"points={which!r}: {', '.join(map(repr, _GROUPS))} or Points")
    kinds = _GROUPS[which] if isinstance(which, str) else which
    found: list[Point] = []
    for where in kinds:
        if isinstance(where, Point):
            found.append(where)
            continue
        step = every if where == "statement" else 1
        found += [Point(where, n) for n in range(1, case.passed.get(where, 0) + 1, step)]
    return found
