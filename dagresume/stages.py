"""Where the cases of a sweep are played, each in a folder of its own, and what is wrong with how they go."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagresume.autopsy import DONE, Autopsy, autopsy
from dagresume.events import enclosing, segments
from dagresume.killpoints import Point
from dagresume.plays import DATABASE, ENDS, Effects, Seen, effects_in
from dagresume.zygote import Ended, Zygote

__all__ = ["Case", "Check", "Scene", "Stage"]

Check = Callable[[Path], Iterable[str]]


@dataclass
class Case:
    """One run that was killed: at these points, one process after the other, until it ended.

    `killed`: how many of the points were reached. `refused`: how many processes refused to go on. `created`:
    whether the run was in the database when its first process died. `violations`: what should not have been.
    `passed`: how many points of each kind its last process went past. `given`: what an action gave.
    """

    points: tuple[Point, ...]
    folder: Path
    killed: int = 0
    refused: int = 0
    created: bool = True
    violations: list[str] = field(default_factory=list)
    passed: Mapping[str, int] = field(default_factory=dict)
    last: Mapping[str, tuple[str, str | None]] = field(default_factory=dict, repr=False)
    outputs: Mapping[str, str] = field(default_factory=dict, repr=False)
    begun: Counter[str] = field(default_factory=Counter, repr=False)
    effects: Counter[str] = field(default_factory=Counter, repr=False)
    given: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return ", then ".join(map(str, self.points)) or "undisturbed"

    @property
    def commits(self) -> int:
        """How many commits its last process made."""
        return self.passed.get("after commit", 0)

    @property
    def statements(self) -> int:
        """How many SQL statements its last process began."""
        return self.passed.get("statement", 0)


class _Theatre:
    """Folders for cases, and how a case goes: one process after the other, until it has ended."""

    expected: Case | None = None

    def __init__(self, check: Check | None, db_dir: str | os.PathLike[str], timeout: float) -> None:
        self._check, self._timeout = check, timeout
        self._base = Path(db_dir).resolve()
        self._base.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count()

    def _make(self, points: tuple[Point, ...]) -> Case:
        """Give a new case, its folder made."""
        case = Case(points, self._base / f"{next(self._numbers):05}")
        case.folder.mkdir()
        return case

    def _end(self, case: Case) -> Case:
        """Judge how it ended; its folder is kept if something is wrong."""
        if self._check is not None:
            case.violations += self._check(case.folder)
        if self.expected is not None and not case.violations:
            case.violations += self._compare(case, self.expected)
        if not case.violations:
            shutil.rmtree(case.folder)
        return case

    def _compare(self, case: Case, expected: Case) -> Iterator[str]:
        """Give how it differs from the one that nothing happened to."""
        kinds = [{path: kind for path, (kind, _) in each.last.items()} for each in (case, expected)]
        if kinds[0] != kinds[1]:
            yield f"the paths ended as {kinds[0]}, undisturbed {kinds[1]}"


def _torn(folder: Path) -> Iterator[str]:
    """Give the files of big outputs that have their name, which is their digest, and are not whole."""
    for file in (folder / f"{DATABASE}.blobs").glob("*/[0-9a-f]*"):
        if hashlib.sha256(file.read_bytes()).hexdigest() != file.name:
            yield f"{file.relative_to(folder)} has its name and is not whole"


def _stuck(ended: Ended) -> str | None:
    """Give how a process ended that neither died at its point nor came to its end."""
    if ended.hung:
        return "hung"
    return f"ended by signal {ended.signal}" if ended.signal and not ended.killed else None


class _Rules:
    """What may not happen to the paths of a workflow, by what is known of its nodes."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._nodes = nodes

    @property
    def ids(self) -> frozenset[str]:
        """The nodes of the workflow itself."""
        return frozenset(node["id"] for node in self._nodes)

    def kept(self, paths: Iterable[str]) -> list[str]:
        """Leave out the pure ones, which are made again whenever somebody needs them."""
        return [path for path in paths if not self.node(path)["pure"]]

    def doubtful(self, state: Autopsy) -> list[str]:
        """Give the paths that nobody can answer for."""
        return sorted(path for path in state.unknown if self._is_anybodys_guess(path))

    def _is_anybodys_guess(self, path: str) -> bool:
        node = self.node(path)
        several = node["is_map"] or node["is_loop"]
        whole = node["body"] or (several and not path.endswith("]"))  # what is inside it is what ran
        return not (node["idempotent"] or node["reconciles"] or whole)

    def begun_too_early(self, state: Autopsy, begun: Counter[str]) -> Iterator[str]:
        """Say what began without a durable start record, or before what it depends on was durable."""
        for path, times in begun.items():
            node = self.node(path)
            if not node["idempotent"] and times > state.starts[path]:
                yield f"{path} has begun {times} times with {state.starts[path]} durable start records"
            waits = [parent for parent in self._needed(path) if not self._is_settled(state, parent)]
            if waits:
                yield f"{path} has begun before {', '.join(waits)} was durable"

    def _needed(self, path: str) -> Iterator[str]:
        """Give what must be durable before this path begins: what it and all around it depends on, and the
        round before.
        """
        for around in (path, *(outer for outer in enclosing(path) if self._is_node(path, outer))):
            node, index = self.node(around), around[around.rindex("[") :] if around.endswith("]") else ""
            for parent in self._parents(around):
                if not self.node(parent)["pure"]:
                    yield parent + index if parent.rpartition("/")[2] in node["chained"] else parent
            if node["is_loop"] and index not in {"", "[0]"}:
                yield f"{around.removesuffix(index)}[{int(index[1:-1]) - 1}]"

    @staticmethod
    def _is_node(path: str, outer: str) -> bool:
        """Say whether this, which encloses the path, is a node, item or round that holds a graph."""
        return path[len(outer)] == "/"

    def _parents(self, path: str) -> list[str]:
        """Give the paths of what this path's node depends on."""
        prefix = path[: path.rindex("/") + 1] if "/" in path else ""
        return [prefix + parent for parent in self.node(path)["parents"]]

    def _is_settled(self, state: Autopsy, path: str) -> bool:
        kind, reason = state.last.get(path, (None, None))
        if kind in DONE | {"node.skipped"} or (kind == "node.failed" and reason != "retry"):
            return True
        return any(self._has_failed(state, parent) for parent in self._parents(path))

    def _has_failed(self, state: Autopsy, path: str) -> bool:
        if state.last.get(path, ("", ""))[0] == "node.failed":
            return True
        return any(self._has_failed(state, parent) for parent in self._parents(path))

    def node(self, path: str) -> dict[str, Any]:
        """Give the facts of the node that a path is one of."""
        nodes: list[dict[str, Any]] | None = self._nodes
        node: dict[str, Any] = {}
        for name, _ in segments(path):
            node = next(each for each in nodes or () if each["id"] == name)
            nodes = node["body"]
        return node


class Stage(_Theatre):
    """Plays runs of one workflow, and knows what may not happen to them."""

    def __init__(
        self,
        source: Mapping[str, Any],
        effects: Effects | None,
        varying: Iterable[str],
        options: Mapping[str, Any] | None,
        check: Check | None,
        db_dir: str | os.PathLike[str],
        timeout: float,
    ) -> None:
        super().__init__(check, db_dir, timeout)
        self._order = {"source": source, "key": "sweep", "options": dict(options or {})}
        self._effects, self._varying = effects, frozenset(varying)
        self._caused: dict[str, Counter[str]] = {}
        self._gave: dict[str, str] = {}

    def rehearse(self, zygote: Zygote) -> Case:
        """Give the run that nothing happens to; with effects, learn first which path has which."""
        source = self._order["source"]
        self._rules = _Rules(zygote.call("dagresume.plays:describe", self._base, source=source).wait().told)
        if self._effects is not None:
            self.expected = self._play(zygote, (), learns=True)
            if self.expected.violations:
                return self.expected
        undisturbed = self.play(zygote, ())
        undisturbed.violations += self._misnamed(undisturbed)
        self.expected = undisturbed
        return undisturbed

    def _misnamed(self, undisturbed: Case) -> Iterator[str]:
        """Say what was named and is not there: what is looked for in the wrong place is never found wrong."""
        if self._effects is not None and not undisturbed.effects:
            yield (
                f"effects={self._effects!r}: the run that nothing happened to had no effect there. Name the"
                " file in the working folder, or the function, that tells of each effect"
            )
        for name in sorted(self._varying - self._rules.ids):
            yield f"varying: there is no node {name!r}"

    def play(self, zygote: Zygote, points: tuple[Point, ...]) -> Case:
        """Run to the first point, go on in a new process to the second, and so on to the end."""
        return self._play(zygote, points)

    def _play(self, zygote: Zygote, points: tuple[Point, ...], *, learns: bool = False) -> Case:
        case, left = self._make(points), list(points)
        action: str | None = "run"
        for _ in range(2 * len(points) + 3):
            state, seen = autopsy(case.folder / DATABASE), Seen.read(case.folder)
            order = self._order | {"action": action, "run_id": state.run_id, "learns": learns}
            if action == "look":
                order["words"] = self._words(case, state)
            at = left[0] if left else None
            ended = zygote.call("dagresume.plays:play", case.folder, **order, point=at).wait(self._timeout)
            if ended.killed:
                case.killed += 1
                left.pop(0)
            action = self._went(case, str(action), state, seen, ended)
            if action is None:
                break
        else:
            case.violations.append("the run does not come to an end")
        case.effects = Counter(effects_in(case.folder, self._effects))
        return self._end(case)

    def _words(self, case: Case, state: Autopsy) -> dict[str, str]:
        """Be a person who looks: give the outputs of the uncertain paths whose effects are there.

        What is there of effects that several paths have is that of the completed ones first.
        """
        there = Counter(effects_in(case.folder, self._effects))
        for path in state.completed:
            there -= self._caused.get(path, Counter())
        words = {}
        for path in self._rules.doubtful(state):
            caused = self._caused.get(path)
            if caused and caused <= there and path in self._gave:
                words[path] = self._gave[path]
                there -= caused
        return words

    def _went(self, case: Case, action: str, before: Autopsy, seen: Seen, ended: Ended) -> str | None:
        """Judge what one process did; give what the next one is to do, None: nothing."""
        wrong, told = case.violations, ended.told or {}
        after, now = autopsy(case.folder / DATABASE), Seen.read(case.folder)
        wrong += self._seen_wrong(case.folder, before, after, seen, now)
        stuck = _stuck(ended)
        if stuck is not None:
            wrong.append(stuck)
            return None
        if ended.killed:
            if case.killed == 1:
                case.created = after.run_id is not None
            return "resume"
        case.passed = told.get("passed", {})
        problem = ended.error or told.get("traceback")
        if problem:
            wrong.append(f"{action} failed: {problem}")
            return None
        doubtful = self._rules.doubtful(before) if action not in {"retry", "look"} else []
        if "refused" in told:
            case.refused += 1
            if sorted(told["refused"]) != doubtful or now.begun != seen.begun:
                wrong.append(f"refused {sorted(told['refused'])}, uncertain are {doubtful}")
            return "retry" if self._effects is None else "look"
        if doubtful:
            wrong.append(f"{action} went on although {', '.join(doubtful)} may have taken effect")
        case.outputs, case.last, case.begun = told["outputs"], after.last, now.begun
        if "caused" in told:
            self._caused = {path: Counter(effects) for path, effects in told["caused"].items()}
            self._gave = told["gave"]
        return None

    def _seen_wrong(
        self, folder: Path, before: Autopsy, after: Autopsy, seen: Seen, now: Seen
    ) -> Iterator[str]:
        yield from self._rules.begun_too_early(after, now.begun)
        repeated = sorted(self._rules.kept(before.completed & (now.begun - seen.begun).keys()))
        if repeated:
            yield f"completed and begun again: {', '.join(repeated)}"
        if now.results > seen.results and after.status not in ENDS:
            yield f"the result was given while the run was {after.status} in the database"
        yield from _torn(folder)

    def _compare(self, case: Case, expected: Case) -> Iterator[str]:
        yield from self._wrong_effects(case, expected)
        outputs = [
            {id_: text for id_, text in each.outputs.items() if id_ not in self._varying}
            for each in (case, expected)
        ]
        other = [id_ for id_ in outputs[0] | outputs[1] if outputs[0].get(id_) != outputs[1].get(id_)]
        if other and not case.points:
            yield (
                f"two runs that nothing happened to differ in the outputs of {', '.join(other)}."
                f" If they may, say so: varying={other!r}"
            )
        elif other:
            yield f"the outputs are {outputs[0]}, undisturbed {outputs[1]}"
        yield from super()._compare(case, expected)
        # A process may die with all of a path's attempts behind it and none of their failures written.
        often = {
            path: case.begun[path]
            for path in self._rules.kept(case.begun)
            if case.begun[path] > expected.begun[path] * (case.killed + 1)
        }
        if often:
            yield f"begun more often than the kills explain: {often}"

    def _wrong_effects(self, case: Case, expected: Case) -> Iterator[str]:
        for effect in sorted(case.effects | expected.effects):
            times, right = case.effects[effect], expected.effects[effect]
            if times == right:
                continue
            paths = sorted(path for path, caused in self._caused.items() if effect in caused)
            of = f" of {', '.join(paths)}" if paths else ""
            happened = f"happened {_times(times)}" if times else "never happened"
            why = "".join(self._why(case, expected, path, times > right) for path in paths)
            yield f"the effect {effect!r}{of} {happened}, undisturbed {_times(right)}{why}"

    def _why(self, case: Case, expected: Case, path: str, too_often: bool) -> str:
        if not too_often:
            return f". {path} counts as completed: its effect came after it had returned, or was lost"
        if case.begun[path] <= expected.begun[path]:
            return ""
        if self._rules.node(path)["idempotent"]:
            return (
                f". {path} is declared idempotent, so it ran again after the kill: give the outside world"
                " ctx.idempotency_key to know it by, or declare idempotent=False"
            )
        return f". {path} ran again although a part of what it does was done"


def _times(n: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(n, f"{n} times")


class Scene(_Theatre):
    """Plays something else than a run, again and again from where `before` left off."""

    def __init__(
        self,
        order: Mapping[str, Any],
        before: str | None,
        check: Check | None,
        db_dir: str | os.PathLike[str],
        timeout: float,
    ) -> None:
        super().__init__(check, db_dir, timeout)
        self._order, self._before = dict(order), before
        self._prepared = self._base / "before"

    def rehearse(self, zygote: Zygote) -> Case:
        """Prepare the folder, and give the case that nothing happens to."""
        self._prepared.mkdir()
        if self._before is not None:
            ended = zygote.call(self._before, self._prepared, **self._order["arguments"]).wait(self._timeout)
            stuck = ended.error or _stuck(ended)
            if stuck is not None:
                return Case((), self._prepared, violations=[f"{self._before} failed: {stuck}"])
        undisturbed = self.play(zygote, ())
        self.expected = undisturbed
        return undisturbed

    def clear(self) -> None:
        """Remove the folder that was prepared, if it is not needed to look at what went wrong."""
        if self.expected is not None and not self.expected.violations:
            shutil.rmtree(self._prepared)

    def play(self, zygote: Zygote, points: tuple[Point, ...]) -> Case:
        """Act to the first point, again in a new process to the second, and so on to the end."""
        case, left = self._make(points), list(points)
        shutil.copytree(self._prepared, case.folder, dirs_exist_ok=True)
        while True:
            at = left[0] if left else None
            ended = zygote.call("dagresume.plays:act", case.folder, **self._order, point=at)
            if not self._acted(case, ended.wait(self._timeout)):
                break
            left.pop(0)
        case.last = autopsy(case.folder / DATABASE).last
        return self._end(case)

    def _acted(self, case: Case, ended: Ended) -> bool:
        """Judge what one process did; say whether another one is to do it again."""
        case.violations += _torn(case.folder)
        if ended.killed:
            case.killed += 1
            return case.killed <= len(case.points) or self._never_ends(case)
        problem = ended.error or _stuck(ended)
        if problem is not None:
            case.violations.append(f"{self._order['action']} failed: {problem}")
        else:
            case.given, case.passed = ended.told["given"], ended.told["passed"]
        return False

    @staticmethod
    def _never_ends(case: Case) -> bool:
        case.violations.append("it was killed where it should not have been")
        return False

    def _compare(self, case: Case, expected: Case) -> Iterator[str]:
        if case.given != expected.given:
            yield f"it gave {case.given!r}, undisturbed {expected.given!r}"
        yield from super()._compare(case, expected)
