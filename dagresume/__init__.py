"""An embedded asyncio DAG engine whose runs survive being killed.

What a name stands for is imported when the name is used first, so that the command line is quick to answer;
type checkers read `__init__.pyi`.
"""

from importlib import import_module
from typing import Any, Final

from dagresume.collector import paused

__version__ = "0.1.0"

_HOMES: Final = {
    "codec": ["codec"],
    "context": ["Context"],
    "engine": ["Engine", "RunHandle"],
    "errors": [
        "AlreadyDecided",
        "AlreadyRunning",
        "AttemptsExhausted",
        "BackupRefused",
        "ImportRefused",
        "BindingError",
        "BudgetExceeded",
        "CheckpointLost",
        "CycleError",
        "DagresumeError",
        "DecisionError",
        "DefinitionError",
        "DuplicateNode",
        "EngineClosed",
        "InputError",
        "InputsChanged",
        "Irreversible",
        "LeaseLost",
        "MissingInput",
        "MutatedInput",
        "NodeTimeout",
        "NoOutput",
        "NotLoadable",
        "NotWaiting",
        "OnceInFlight",
        "OnceUncertain",
        "OutputNotSerializable",
        "OwnershipError",
        "RecoveryRefused",
        "RolledBack",
        "RunCancelled",
        "RunFailed",
        "RunInterrupted",
        "RunLocked",
        "RunNotFound",
        "SchemaTooNew",
        "StoreCorrupt",
        "StoreError",
        "StoreFull",
        "StoreReadOnly",
        "TooManyAbandoned",
        "UncertainNode",
        "UnknownDependency",
        "VersionMismatch",
        "WorkerDied",
        "WorkflowNotRegistered",
    ],
    "events": ["Event", "NodeStatus", "RunStatus"],
    "explain": ["Explanation"],
    "metrics": ["Alarm", "Metrics"],
    "planner": ["Decision"],
    "policy": [
        "NOT_DONE",
        "Budget",
        "ItemFailure",
        "Limit",
        "NodeFailure",
        "Recovery",
        "Retry",
        "RetryAfter",
        "Value",
    ],
    "recovery": ["RecoveryOutcome"],
    "results": ["RunResult"],
    "retention": ["Pruned"],
    "reverse": ["UndoPlan"],
    "sync": ["run_sync"],
    "views": ["NodeInfo", "RunInfo"],
    "workflow": ["Workflow"],
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with paused():  # all that is made here stays
        home = import_module(f"{__name__}.{_HOME_OF[name]}")
    found = globals()[name] = home if name == _HOME_OF[name] else getattr(home, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
