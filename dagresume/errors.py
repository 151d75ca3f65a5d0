"""Every error dagresume raises, on one page.

    DagresumeError
    ├── DefinitionError                 the workflow cannot be built as written
    │   ├── CycleError                  its edges form a circle
    │   ├── UnknownDependency           a name that is neither a node nor an input
    │   ├── DuplicateNode               two nodes of one id
    │   └── BindingError                a parameter that nothing feeds
    ├── InputError                      the run's inputs do not fit
    │   ├── MissingInput
    │   ├── InputsChanged               this key already has a run with other inputs
    │   └── MutatedInput                a shared value was changed by its reader (debug mode)
    ├── RunFailed                       a node failed for good; .failures says which
    ├── RunCancelled                    somebody cancelled the run
    ├── RunInterrupted                  the run stopped without an end; it can be resumed
    │   └── BudgetExceeded              its budget is used up
    ├── NoOutput (KeyError)             this path has no output to give
    ├── OutputNotSerializable           a node returned what cannot be stored
    ├── NodeTimeout (TimeoutError)
    ├── TooManyAbandoned                bodies in threads that cannot be ended
    ├── WorkerDied                      a process that ran a node has died
    ├── StoreError                      the database
    │   ├── StoreCorrupt
    │   ├── StoreReadOnly
    │   ├── StoreFull
    │   ├── BackupRefused           there can be no copy at this place
    │   ├── ImportRefused           these lines are no export, or cannot go in here
    │   ├── SchemaTooNew
    │   ├── CheckpointLost              a stored value is gone or altered
    │   └── NotLoadable                 a stored value's type is not known here
    ├── OwnershipError                  somebody else drives the run
    │   ├── RunLocked
    │   ├── LeaseLost
    │   └── AlreadyRunning
    ├── RecoveryRefused                 going on needs a person's word
    │   ├── VersionMismatch
    │   ├── UncertainNode
    │   │   └── OnceUncertain           a call made once began, nobody knows how it ended
    │   ├── Irreversible            a rollback could not undo everything
    │   ├── AttemptsExhausted
    │   ├── RolledBack
    │   └── WorkflowNotRegistered
    ├── OnceInFlight                    a call made once is under way elsewhere
    ├── DecisionError
    │   ├── NotWaiting
    │   └── AlreadyDecided
    ├── RunNotFound (LookupError)
    └── EngineClosed

Each carries its facts as attributes and says in its message what to do next. `str(error)` is one line.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagresume.masks import without_passwords

if TYPE_CHECKING:
    from datetime import datetime

    from dagresume.policy import NodeFailure


class DagresumeError(Exception):
    """Base of every error this package raises on purpose. No password of a URL stands in its message."""

    def __init__(self, *told: object) -> None:
        super().__init__(*(without_passwords(each) if isinstance(each, str) else each for each in told))


# -- definition and inputs ------------------------------------------------------------------------------


class DefinitionError(DagresumeError):
    """The workflow cannot be built as written."""


class CycleError(DefinitionError):
    """The edges form a circle; `.cycle` holds the node ids, the first one again at the end."""

    def __init__(self, workflow: str, cycle: Sequence[str]) -> None:
        self.workflow, self.cycle = workflow, tuple(cycle)
        super().__init__(
            f"workflow {workflow!r} has a cycle: {' → '.join(self.cycle)}. Remove one of these edges."
        )


class UnknownDependency(DefinitionError):
    """A node asks for a name that is neither a node nor a run input; `.name`, `.node`, `.suggestion`."""

    def __init__(self, node: str, name: str, suggestion: str | None = None, what: str = "depends on") -> None:
        self.node, self.name, self.suggestion = node, name, suggestion
        hint = f" Did you mean {suggestion!r}?" if suggestion else ""
        super().__init__(f"node {node!r} {what} {name!r}, which is neither a node nor an input.{hint}")


class DuplicateNode(DefinitionError):
    """Two nodes of one id; `.node`."""

    def __init__(self, workflow: str, node: str) -> None:
        self.workflow, self.node = workflow, node
        super().__init__(
            f"workflow {workflow!r} already has a node {node!r}. Give one of them another id: @wf.node(id=…)."
        )


class BindingError(DefinitionError):
    """A parameter of a node's function cannot be fed; `.node`, `.parameter`."""

    def __init__(self, node: str, parameter: str, problem: str) -> None:
        self.node, self.parameter = node, parameter
        super().__init__(f"node {node!r}, parameter {parameter!r}: {problem}")


class InputError(DagresumeError):
    """The inputs given to a run do not fit its workflow."""


class MissingInput(InputError):
    """Inputs the workflow needs and did not get; `.names`."""

    def __init__(self, workflow: str, names: Sequence[str], hint: str = "") -> None:
        self.workflow, self.names = workflow, tuple(names)
        listed = ", ".join(map(repr, names))
        super().__init__(f"workflow {workflow!r} needs the input{'s'[: len(names) > 1]} {listed}.{hint}")


class InputsChanged(InputError):
    """The newest run of this key was started with other inputs; `.run_id`, `.names`."""

    def __init__(self, workflow: str, key: str, run_id: str, names: Sequence[str]) -> None:
        self.workflow, self.key, self.run_id, self.names = workflow, key, run_id, tuple(names)
        super().__init__(
            f"run {run_id} of workflow {workflow!r} with key {key!r} was started with other inputs"
            f" (different: {', '.join(names)}). Use the same inputs, another key, fresh=True for a new run,"
            f" or fork it with the new ones: engine.fork({run_id!r}, inputs=…)."
        )


class MutatedInput(InputError):
    """A value shared by the items of a map was changed by one of them (found in debug mode); `.path`."""

    def __init__(self, path: str, parameter: str) -> None:
        self.path, self.parameter = path, parameter
        super().__init__(
            f"{path} changed its argument {parameter!r}, which all items of the map share."
            f" Copy it first (copy.deepcopy({parameter})) or pass it through for_each."
        )


# -- ends of a run --------------------------------------------------------------------------------------


class RunFailed(DagresumeError):
    """One or more nodes failed for good; `.run_id`, `.failures` ({path: NodeFailure}, definition order)."""

    def __init__(
        self, run_id: str, failures: Mapping[str, NodeFailure], note: str = "", advice: str = ""
    ) -> None:
        self.run_id, self.failures = run_id, dict(failures)
        first = next(iter(self.failures.values()), None)
        if first is None:
            what = note or "no node could go on"
        else:
            more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
            what = f"{first.path} failed: {first.type}: {_one_line(first.message)}{more}"
        advice = advice or (
            f"Finished work is kept: mend the cause, then `dagresume resume {run_id}` or"
            f" engine.resume({run_id!r}) runs what is missing."
        )
        super().__init__(f"run {run_id}: {what.rstrip('.')}. {advice}")


class RunCancelled(DagresumeError):
    """The run was cancelled by a person; `.run_id`, `.by`."""

    def __init__(self, run_id: str, by: str = "") -> None:
        self.run_id, self.by = run_id, by
        super().__init__(
            f"run {run_id} was cancelled{f' by {by}' if by else ''}. It never resumes by itself;"
            f" `dagresume retry {run_id} --from NODE` reopens it."
        )


class RunInterrupted(DagresumeError):
    """The run stopped without an end (shutdown, budget, abandoned thread); `.run_id`, `.reason`."""

    def __init__(self, run_id: str, reason: str, detail: str = "") -> None:
        self.run_id, self.reason = run_id, reason
        cure = f"`dagresume resume {run_id}` goes on."
        if reason == "budget":
            cure = f"raise the budget, engine.resume({run_id!r}, budget=Budget(…)), and it goes on."
        super().__init__(
            f"run {run_id} was interrupted ({reason}){detail and f': {detail}'}. Finished work is kept:"
            f" {cure}"
        )


class BudgetExceeded(RunInterrupted):
    """The run's budget is used up, so nothing new was started; `.run_id`."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id, "budget")


class NoOutput(DagresumeError, KeyError):
    """This path has no output to give; `.path`, `.status` (None: there is no such path)."""

    def __init__(self, path: str, status: str | None, hint: str = "") -> None:
        self.path, self.status = path, status
        state = f"is {status}" if status else "does not exist in this run"
        super().__init__(f"no output of {path!r}: it {state}.{hint}")

    __str__ = Exception.__str__  # KeyError would show the repr


class OutputNotSerializable(DagresumeError):
    """A value cannot be stored without loss; `.node`, `.place` (`$.items[3].when`), `.type_name`,
    `.reason`.
    """

    def __init__(self, node: str | None, place: str, type_name: str, reason: str) -> None:
        self.node, self.place, self.type_name, self.reason = node, place, type_name, reason
        whose = f"output of node {node!r}" if node else "value"
        super().__init__(f"{whose} is not serialisable: {place} is {type_name}. {reason}")


class NodeTimeout(DagresumeError, TimeoutError):
    """An attempt ran longer than its node's `timeout`; `.path`, `.seconds`."""

    def __init__(self, path: str, seconds: float, note: str = "") -> None:
        self.path, self.seconds = path, seconds
        super().__init__(f"{path} did not finish within its timeout of {seconds:g} s{note}")


class TooManyAbandoned(DagresumeError):
    """More bodies than allowed run on in threads after their time limit or cancellation; `.paths`."""

    def __init__(self, paths: list[str], limit: int) -> None:
        self.paths = tuple(paths)
        shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
        super().__init__(
            f"{len(paths)} bodies still run in threads that were given up ({shown}). At most {limit} may, so"
            " no other is started. Threads cannot be killed: give what blocks there a time limit, or"
            " use executor='process'."
        )


class WorkerDied(DagresumeError):
    """The worker process ended before its work did; `.path`, `.exitcode`, `.began`.

    `exitcode` below 0 is minus the signal. Not `began`: the body certainly did not run; else nobody knows how
    far it got.
    """

    def __init__(self, path: str, exitcode: int | None, *, began: bool = True) -> None:
        self.path, self.exitcode, self.began = path, exitcode, began
        if exitcode is None:
            how = "closed its pipe"
        elif exitcode >= 0:
            how = f"exited with code {exitcode}"
        else:
            how = f"was ended by {_signal_name(-exitcode)}"
        if not began:
            advice = (
                "It had not begun yet; why, it said on stderr. A worker imports the main script first, which"
                ' must start its run under `if __name__ == "__main__":`.'
            )
        else:
            advice = "Out of memory, a crash in native code or os._exit end a process so."
        super().__init__(f"{path}: the worker process {how}. {advice}")


# -- the store ------------------------------------------------------------------------------------------


class StoreError(DagresumeError):
    """The database refused or failed; the original error is the `__cause__`."""


class StoreCorrupt(StoreError):
    """The file is not a sound dagresume database; `.path`."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}. The file was not changed. Name another file with --db.")


class StoreReadOnly(StoreError):
    """The database file or its folder cannot be written; `.path`."""

    def __init__(
        self, path: str, problem: str, advice: str = "Change its permissions or name another file with --db."
    ) -> None:
        self.path = path
        super().__init__(f"{path} cannot be written: {problem}. {advice}")


class StoreFull(StoreError):
    """No space left for the database; `.path`."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: {problem}. Free some space, then resume the run: nothing finished is lost."
        )


class BackupRefused(StoreError):
    """There can be no copy at this place, or of this file; nothing was changed."""


class ImportRefused(StoreError):
    """These lines cannot be imported; `.line` is the number of the one that is wrong. Of its run nothing was
    written.
    """

    def __init__(self, message: str, line: int) -> None:
        self.line = line
        super().__init__(message)


class SchemaTooNew(StoreError):
    """The database was written by a newer dagresume; `.path`, `.found`, `.known`."""

    def __init__(self, path: str, found: int, known: int) -> None:
        self.path, self.found, self.known = path, found, known
        super().__init__(
            f"{path} has schema {found}, this dagresume knows up to {known}. The file was not changed."
            " Update: pip install -U dagresume"
        )


class CheckpointLost(StoreError):
    """A stored value is missing or was altered; `.run_id`, `.path`."""

    def __init__(self, run_id: str, path: str, problem: str) -> None:
        self.run_id, self.path = run_id, path
        if path == INPUTS:
            told = f"the stored inputs {problem}. Put the file back, or start a new run with the same inputs."
        else:
            told = (
                f"the stored output of {path} {problem}. Make it again:"
                f" `dagresume retry {run_id} --from {path}`"
            )
        super().__init__(f"run {run_id}: {told}")


INPUTS = "inputs()"
"""In place of a path, which it cannot be: what a run was given, as a stored value."""


class NotLoadable(StoreError):
    """A stored value needs a type that is not known here; `.reason`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


# -- owners and recovery --------------------------------------------------------------------------------


class OwnershipError(DagresumeError):
    """Another session drives the run."""


class _Held(OwnershipError):
    def __init__(self, run_id: str, holder: str, since: datetime | None = None, advice: str = "") -> None:
        self.run_id, self.holder, self.since = run_id, holder, since
        start = f" since {since.astimezone():%Y-%m-%d %H:%M:%S}" if since else ""
        super().__init__(f"{self._what.format(run_id=run_id)} {holder}{start}.{advice}")

    _what = "run {run_id} is driven by"


class RunLocked(_Held):
    """The run is driven by a living session; `.run_id`, `.holder` (host, process), `.since`."""


class AlreadyRunning(_Held):
    """The key's newest run is alive; `.run_id`, `.holder` (host, process), `.since`."""

    _what = "a run with this key is already under way: {run_id}, driven by"


class LeaseLost(_Held):
    """Another session took this run over while we drove it; nothing further was written; `.run_id`."""

    _what = "this process no longer owns run {run_id}: it was taken over by"


class RecoveryRefused(DagresumeError):
    """Going on needs a person's word."""


class VersionMismatch(RecoveryRefused):
    """The definition is not the one the run was started with; `.run_id`, `.differences`."""

    def __init__(self, run_id: str, workflow: str, differences: Sequence[str]) -> None:
        self.run_id, self.workflow, self.differences = run_id, workflow, tuple(differences)
        super().__init__(
            f"run {run_id}: the definition of {workflow!r} changed since it started:"
            f" {'; '.join(differences)}."
            f" Go on with the new one: `dagresume resume {run_id} --force`, declare a migration (wf.migrate),"
            " or run the version it was started with."
        )


class UncertainNode(RecoveryRefused):
    """Paths that began, are not known to have ended and must not run twice; `.run_id`, `.paths`."""

    def __init__(self, run_id: str, paths: Sequence[str]) -> None:
        self.run_id, self.paths = run_id, tuple(paths)
        super().__init__(
            f"run {run_id}: nobody knows whether {listed(self.paths)} took effect (started, not known to"
            f" have ended, not idempotent). Look, then say what it did: `dagresume resolve {run_id}"
            f" {self.paths[0]} --output … | --failed …`; or run it again: `dagresume retry {run_id}`; or give"
            " the node a reconcile= that can tell."
        )


class Irreversible(RecoveryRefused):
    """A rollback would leave effects behind; nothing was undone. `.run_id`, `.paths`, `.uncertain`.

    `paths` completed, are not idempotent and have no `compensate=`; of `uncertain` nobody knows whether they
    took effect.
    """

    def __init__(self, run_id: str, paths: Sequence[str], uncertain: Sequence[str] = ()) -> None:
        self.run_id, self.paths, self.uncertain = run_id, tuple(paths), tuple(uncertain)
        told = []
        if paths:
            told.append(f"what {listed(self.paths)} did cannot be undone (not idempotent, no compensate=)")
        if uncertain:
            told.append(f"nobody knows whether {listed(self.uncertain)} took effect")
        super().__init__(
            f"run {run_id}: {', and '.join(told)}. Nothing was undone. To leave that as it is and undo the"
            f" rest: `dagresume rollback {run_id} --accept-irreversible` or"
            f" engine.rollback({run_id!r}, accept_irreversible=True)."
        )


class OnceUncertain(UncertainNode):
    """A call made by `ctx.once` began, and nobody knows whether it took effect; `.run_id`, `.path`, `.key`,
    `.scope`.

    Raised in the body. It makes the path uncertain and is never retried by itself.
    """

    def __init__(self, run_id: str, path: str, key: str, scope: str, began: str) -> None:
        self.run_id, self.paths, self.path, self.key, self.scope = run_id, (path,), path, key, scope
        RecoveryRefused.__init__(
            self,
            f"{path}: once({key!r}) began in {began} and left no result, so nobody knows whether it took"
            f" effect. Look; then say what {path} gave: `dagresume resolve {run_id} {path}`, or have it"
            f" called again: `dagresume retry {run_id}`",
        )


class OnceInFlight(DagresumeError):
    """A call made by `ctx.once` is under way elsewhere just now; `.path`, `.key`."""

    def __init__(self, path: str, key: str, where: str) -> None:
        self.path, self.key = path, key
        super().__init__(
            f"{path}: once({key!r}) is under way in {where}. Its result can be had when that has ended: give"
            " this node a retry=, or call it in one place and pass the result on."
        )


class AttemptsExhausted(RecoveryRefused):
    """Automatic recovery has used up its attempts; `.run_id`, `.attempts`."""

    def __init__(self, run_id: str, attempts: int) -> None:
        self.run_id, self.attempts = run_id, attempts
        super().__init__(
            f"run {run_id} was resumed automatically {attempts} times. Find out why it keeps stopping, then"
            f" `dagresume resume {run_id}`"
        )


class RolledBack(RecoveryRefused):
    """What the run had done was undone, or is being undone, so nothing of it runs again; `.run_id`."""

    def __init__(self, run_id: str, *, under_way: bool = False) -> None:
        self.run_id = run_id
        if under_way:
            told = (
                "is being rolled back, so nothing of it runs again. Go on with that:"
                f" `dagresume rollback {run_id}`"
            )
        else:
            told = (
                "was rolled back: what it had done is undone. Start a new run, or fork it:"
                f" `dagresume fork {run_id}`"
            )
        super().__init__(f"run {run_id} {told}")


class WorkflowNotRegistered(RecoveryRefused):
    """The run's workflow is not known to this engine; `.workflow`, `.version`."""

    def __init__(self, run_id: str, workflow: str, version: str) -> None:
        self.run_id, self.workflow, self.version = run_id, workflow, version
        super().__init__(
            f"run {run_id} is of workflow {workflow!r} version {version!r}, which this engine does not know."
            " Register it: Engine(…, workflows=[wf]) or engine.register(wf); on the command line:"
            " --app package.module:workflow"
        )


class DecisionError(DagresumeError):
    """A decision that could not be taken."""


class NotWaiting(DecisionError):
    """Nothing waits at this path; `.run_id`, `.path`, `.status`."""

    def __init__(self, run_id: str, path: str, status: str) -> None:
        self.run_id, self.path, self.status = run_id, path, status
        super().__init__(f"run {run_id}: {path} does not wait for anything, it is {status}.")


class AlreadyDecided(DecisionError):
    """Somebody decided otherwise before; `.run_id`, `.path`, `.by`, `.at`."""

    def __init__(self, run_id: str, path: str, decision: str, by: str, at: datetime) -> None:
        self.run_id, self.path, self.decision, self.by, self.at = run_id, path, decision, by, at
        super().__init__(
            f"run {run_id}: {path} was already {decision} by {by or 'somebody'} at {at.isoformat()}."
            " This answer was not recorded."
        )


class RunNotFound(DagresumeError, LookupError):
    """No run of this id in the store; `.run_id`, `.store`."""

    def __init__(self, run_id: str, store: str) -> None:
        self.run_id, self.store = run_id, store
        super().__init__(f"no run {run_id!r} in {store}. `dagresume list --db {store}` shows what is there.")


class EngineClosed(DagresumeError):
    """The engine is not open; use it inside `async with Engine(…) as engine`."""

    def __init__(self) -> None:
        super().__init__("the engine is not open. Use it inside `async with Engine(…) as engine:`")


def listed(paths: Sequence[str]) -> str:
    """Give paths as a sentence names them: the first five, and how many more."""
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


def _one_line(text: str) -> str:
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= 300 else line[:297] + "…"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
