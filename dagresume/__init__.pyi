"""An embedded asyncio DAG engine whose runs survive being killed."""

from dagresume import codec
from dagresume.context import (
    Context,
)
from dagresume.engine import (
    Engine,
    RunHandle,
)
from dagresume.errors import (
    AlreadyDecided,
    AlreadyRunning,
    AttemptsExhausted,
    BackupRefused,
    BindingError,
    BudgetExceeded,
    CheckpointLost,
    CycleError,
    DagresumeError,
    DecisionError,
    DefinitionError,
    DuplicateNode,
    EngineClosed,
    ImportRefused,
    InputError,
    InputsChanged,
    Irreversible,
    LeaseLost,
    MissingInput,
    MutatedInput,
    NodeTimeout,
    NoOutput,
    NotLoadable,
    NotWaiting,
    OnceInFlight,
    OnceUncertain,
    OutputNotSerializable,
    OwnershipError,
    RecoveryRefused,
    RolledBack,
    RunCancelled,
    RunFailed,
    RunInterrupted,
    RunLocked,
    RunNotFound,
    SchemaTooNew,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    TooManyAbandoned,
    UncertainNode,
    UnknownDependency,
    VersionMismatch,
    WorkerDied,
    WorkflowNotRegistered,
)
from dagresume.events import (
    Event,
    NodeStatus,
    RunStatus,
)
from dagresume.explain import (
    Explanation,
)
from dagresume.metrics import (
    Alarm,
    Metrics,
)
from dagresume.planner import (
    Decision,
)
from dagresume.policy import (
    NOT_DONE,
    Budget,
    ItemFailure,
    Limit,
    NodeFailure,
    Recovery,
    Retry,
    RetryAfter,
    Value,
)
from dagresume.recovery import (
    RecoveryOutcome,
)
from dagresume.results import (
    RunResult,
)
from dagresume.retention import (
    Pruned,
)
from dagresume.reverse import (
    UndoPlan,
)
from dagresume.sync import (
    run_sync,
)
from dagresume.views import (
    NodeInfo,
    RunInfo,
)
from dagresume.workflow import (
    Workflow,
)

__version__: str

__all__ = [
    "NOT_DONE",
    "Alarm",
    "AlreadyDecided",
    "AlreadyRunning",
    "AttemptsExhausted",
    "BackupRefused",
    "BindingError",
    "Budget",
    "BudgetExceeded",
    "CheckpointLost",
    "Context",
    "CycleError",
    "DagresumeError",
    "Decision",
    "DecisionError",
    "DefinitionError",
    "DuplicateNode",
    "Engine",
    "EngineClosed",
    "Event",
    "Explanation",
    "ImportRefused",
    "InputError",
    "InputsChanged",
    "Irreversible",
    "ItemFailure",
    "LeaseLost",
    "Limit",
    "Metrics",
    "MissingInput",
    "MutatedInput",
    "NoOutput",
    "NodeFailure",
    "NodeInfo",
    "NodeStatus",
    "NodeTimeout",
    "NotLoadable",
    "NotWaiting",
    "OnceInFlight",
    "OnceUncertain",
    "OutputNotSerializable",
    "OwnershipError",
    "Pruned",
    "Recovery",
    "RecoveryOutcome",
    "RecoveryRefused",
    "Retry",
    "RetryAfter",
    "RolledBack",
    "RunCancelled",
    "RunFailed",
    "RunHandle",
    "RunInfo",
    "RunInterrupted",
    "RunLocked",
    "RunNotFound",
    "RunResult",
    "RunStatus",
    "SchemaTooNew",
    "StoreCorrupt",
    "StoreError",
    "StoreFull",
    "StoreReadOnly",
    "TooManyAbandoned",
    "UncertainNode",
    "UndoPlan",
    "UnknownDependency",
    "Value",
    "VersionMismatch",
    "WorkerDied",
    "Workflow",
    "WorkflowNotRegistered",
    "codec",
    "run_sync",
]
