"""`dagresume run`, `resume`, `retry` and `fork`: the commands that execute nodes."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import typer

from dagresume import words
from dagresume.cli.command import (
    DEFAULT_DB,
    REFUSED,
    Apps,
    Command,
    Concurrency,
    Db,
    Debug,
    Here,
    Json,
    Limits,
    Problem,
    RunId,
    Synchronous,
    commands,
)
from dagresume.cli.engines import finished, opened, resolve, work
from dagresume.cli.plans import print_plan
from dagresume.cli.progress import watching
from dagresume.cli.screen import clean, say
from dagresume.cli.summary import report
from dagresume.cli.targets import apps, inputs_of, limits_of, one_workflow, workflows
from dagresume.engine import Engine
from dagresume.errors import DefinitionError
from dagresume.events import RunStatus
from dagresume.planner import Decision
from dagresume.program import Asked
from dagresume.results import RunResult
from dagresume.workflow import Workflow

__all__ = ["group"]

group = commands()
Force = Annotated[
    bool, typer.Option("--force", help="Take the present definition although the run began with another one.")
]


class _Forms(TypedDict):
    """Which form of a retry is asked for."""

    only_changed: bool
    only_failed: bool
    code_changed: bool


class _Settings(NamedTuple):
    """How the engine of a command is opened."""

    db: str
    limit: list[str] | None
    concurrency: int
    synchronous: str

    def engine(
        self, known: Sequence[Workflow], *, run: str | None = None, create: bool = False
    ) -> AbstractAsyncContextManager[Engine]:
        return opened(
            self.db,
            known,
            run=run,
            create=create,
            limits=limits_of(self.limit),
            concurrency=self.concurrency,
            synchronous=self.synchronous,
        )

    def check(self, wf: Workflow | None) -> None:
        """Refuse a workflow that names a limit which is not given."""
        have = limits_of(self.limit)
        for node in wf.nodes.values() if wf is not None else ():
            if node.limit is not None and node.limit not in have:
                raise Problem(
                    f"node {node.id!r} names the limit {node.limit!r}. Give it:"
                    f" --limit {node.limit}=8 (at once) or --limit {node.limit}=500/minute"
                )


@group.command("run", cls=Command)
def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The workflow: package.module:attribute or path/flow.py[:attribute].",
            show_default=False,
        ),
    ],
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=VALUE",
            help="A run input; JSON if it is JSON, else text. May be repeated.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="Run inputs as a JSON object.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", help="The business key: the run with this key is resumed, or its result given."
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run whatever the key holds.")] = False,
    window: Annotated[
        float | None,
        typer.Option(
            "--window", metavar="SECONDS", min=0, help="A completed run older than this counts no more."
        ),
    ] = None,
    limit: Limits = None,
    concurrency: Concurrency = 64,
    synchronous: Synchronous = "full",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a workflow; with --key resume its run, or give what it completed with."""
    if key is None and window is not None:
        raise Problem("--window says how long the result of a --key counts; give a --key too.")
    wf = one_workflow(target)
    values = inputs_of(wf, given or [], inputs)
    settings = _Settings(db, limit, concurrency, synchronous)
    settings.check(wf)
    wf.compiled.check_inputs(values)  # before a database is made

    async def begin(engine: Engine) -> tuple[str, asyncio.Task[RunResult]]:
        handle = await engine.start(wf, values, key=key, window=window, fresh=fresh)
        return handle.run_id, asyncio.create_task(handle.result(raise_on_failure=False))

    engine = settings.engine([wf], create=True)
    result = work(partial(finished, engine, begin, partial(watching, quiet=as_json)))
    raise typer.Exit(_report(result, [wf], Here(db, (target,), tuple(limit or ())), as_json=as_json))


@group.command("resume", cls=Command)
def resume(
    run: RunId,
    force: Force = False,
    app: Apps = None,
    limit: Limits = None,
    concurrency: Concurrency = 64,
    synchronous: Synchronous = "full",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run what is missing of a run; what completed is not executed again."""
    settings = _Settings(db, limit, concurrency, synchronous)
    known = workflows(apps(app))
    result = _gone_on(
        settings,
        known,
        run,
        lambda engine, run_id: engine.resume(run_id, force=force, raise_on_failure=False),
        quiet=as_json,
    )
    here = Here(db, tuple(app or ()), tuple(limit or ()))
    raise typer.Exit(_report(result, known, here, as_json=as_json))


@group.command("retry", cls=Command)
def retry(
    run: RunId,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PATH", help="A node, or an item like score[3]: it and all below it run again."
        ),
    ] = None,
    only_changed: Annotated[
        bool, typer.Option("--only-changed", help="What is below runs only if what it receives differs.")
    ] = False,
    only_failed: Annotated[
        bool, typer.Option("--only-failed", help="Of the map that --from names only its failed items.")
    ] = False,
    code_changed: Annotated[
        bool, typer.Option("--code-changed", help="Instead of --from: the paths whose code is another now.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Force = False,
    app: Apps = None,
    limit: Limits = None,
    concurrency: Concurrency = 64,
    synchronous: Synchronous = "full",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run again what failed, was cut off or is uncertain; with --from a path and everything below it."""
    settings = _Settings(db, limit, concurrency, synchronous)
    known = workflows(apps(app))
    forms = _Forms(only_changed=only_changed, only_failed=only_failed, code_changed=code_changed)
    _check_forms(from_, forms)

    async def look() -> tuple[str, list[Decision]]:
        async with opened(db, known, run=run) as engine:
            run_id = await resolve(engine, run, db)
            try:
                asked = Asked(retry=from_ or "", force=force, **forms)
                return run_id, await engine.plan(run_id, items=True, asked=asked)
            except DefinitionError as error:
                raise Problem(f"--from {from_!r}: {error}" if from_ else str(error)) from error

    run_id, decisions = work(look)
    if not as_json:
        print_plan(decisions, items=False)
        _name(decisions)
    _agree(decisions, yes=yes, asks=not as_json and sys.stdin.isatty() and sys.stdout.isatty())
    result = _gone_on(
        settings,
        known,
        run_id,
        lambda engine, run_id: engine.retry(run_id, from_, force=force, raise_on_failure=False, **forms),
        quiet=as_json,
    )
    here = Here(db, tuple(app or ()), tuple(limit or ()))
    raise typer.Exit(_report(result, known, here, as_json=as_json))


def _check_forms(start: str | None, forms: _Forms) -> None:
    """Refuse options that mean nothing together."""
    if start == "":
        raise Problem("--from '': name a node, or an item like score[3]")
    if forms["code_changed"] and (start or forms["only_failed"]):
        raise Problem("--code-changed finds by itself what runs again: leave --from and --only-failed out")
    if forms["only_failed"] and not start:
        raise Problem("--only-failed is about the items of a map: name it with --from")
    if forms["only_changed"] and not (start or forms["code_changed"]):
        raise Problem("--only-changed is about what is below a node: name it with --from")


@group.command("fork", cls=Command)
def fork(
    run: RunId,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="PATH", help="A node, or an item like score[3]: it and all below it run again."
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=VALUE",
            help="A run input that is to be another one; JSON if it is JSON, else text. May be repeated.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="Such inputs as a JSON object.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="The business key of the new run.")] = None,
    app: Apps = None,
    limit: Limits = None,
    concurrency: Concurrency = 64,
    synchronous: Synchronous = "full",
    db: Db = DEFAULT_DB,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Begin a new run with what another has completed; --from and other inputs say what runs again."""
    settings = _Settings(db, limit, concurrency, synchronous)
    known = workflows(apps(app))

    async def begin(engine: Engine, run_id: str) -> RunResult:
        wf = _workflow((await engine.get(run_id)).workflow, known)
        values = {} if wf is None else inputs_of(wf, given or [], inputs)
        return await engine.fork(run_id, from_, inputs=values, key=key, raise_on_failure=False)

    result = _gone_on(settings, known, run, begin, quiet=True)
    here = Here(db, tuple(app or ()), tuple(limit or ()))
    raise typer.Exit(_report(result, known, here, as_json=as_json))


def _repeated(decisions: Sequence[Decision], how: str, action: str = "run") -> list[str]:
    return [d.path for d in decisions if d.repeats == how and d.action == action]


def _name(decisions: Sequence[Decision]) -> None:
    for paths, told in (
        (
            _repeated(decisions, "completed"),
            "completed and not idempotent, so their effects happen a second time",
        ),
        (
            _repeated(decisions, "completed", "check"),
            "if it comes to that, completed and not idempotent: their effects would happen a second time",
        ),
        (
            _repeated(decisions, "uncertain"),
            "begun and not idempotent, so their effects may happen a second time",
        ),
    ):
        if paths:
            say("")
            say((f"Runs again, {told}:", "bold"))
            for path in paths[:20]:
                say(f"  {clean(path)}")
            if len(paths) > 20:
                say(f"  and {len(paths) - 20:,} more")
    say("")


def _agree(decisions: Sequence[Decision], *, yes: bool, asks: bool) -> None:
    """Go on only with a person's word: asked on a terminal, else --yes where effects would happen twice."""
    if yes:
        return
    if asks:
        if not typer.confirm("Run this?"):
            raise Problem("nothing was changed", REFUSED)
        return
    completed = _repeated(decisions, "completed") + _repeated(decisions, "completed", "check")
    if completed:
        shown = ", ".join(completed[:5]) + (", …" if len(completed) > 5 else "")
        raise Problem(
            f"{words.counted(len(completed), 'completed path')} would run again without being"
            f" idempotent: {shown}. If that is what you want, add --yes.",
            REFUSED,
        )


def _gone_on(
    settings: _Settings,
    known: Sequence[Workflow],
    run: str,
    go_on: Callable[[Engine, str], Coroutine[Any, Any, RunResult]],
    *,
    quiet: bool,
) -> RunResult:
    async def begin(engine: Engine) -> tuple[str, asyncio.Task[RunResult]]:
        run_id = await resolve(engine, run, settings.db)
        settings.check(_workflow((await engine.get(run_id)).workflow, known))
        return run_id, asyncio.create_task(go_on(engine, run_id))

    return work(partial(finished, settings.engine(known, run=run), begin, partial(watching, quiet=quiet)))


def _report(result: RunResult, known: Sequence[Workflow], here: Here, *, as_json: bool) -> int:
    """Print how a run ended. One that was cut off is asked which of its paths nobody knows the outcome of."""

    async def ask() -> list[str]:
        async with opened(here.db, known) as engine:
            plan = await engine.plan(result.run_id, items=True)
            return [d.path for d in plan if d.reason == "uncertain" and not d.items]

    cut_off = result.status is RunStatus.INTERRUPTED and not as_json and here.db != ":memory:"
    uncertain = work(ask) if cut_off else []
    return report(result, _workflow(result.workflow, known), here, as_json=as_json, uncertain=uncertain)


def _workflow(name: str, known: Sequence[Workflow]) -> Workflow | None:
    return next((wf for wf in reversed(known) if wf.name == name), None)
