"""Spans and metrics (issue: telemetry): who is whose parent, also in threads, processes and after a kill."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dagresume import Context, Engine, Retry, RunFailed, RunResult, Workflow
from dagresume.journal import MAX_ROWS
from dagresume.otel import Instrumentor, OpenTelemetry
from dagresume.otel.metrics import INSTRUMENTS
from dagresume.otel.spans import ATTRIBUTES
from dagresume.store import Outcome, Unit
from dagresume.testing import Faults
from tests.extras.traced import compute, flow

PAGE = Path(__file__).parents[2] / "dagresume" / "docs" / "otel.md"
SHOWN = ("path", "attempt", "status", "reason", "executed", "reused")


class Recorded:
    """What became of the spans and metrics of one test."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.tracer = self.provider.get_tracer("application")
        self.observer = OpenTelemetry(tracer_provider=self.provider, meter_provider=self.meters)

    def engine(self, db: Path, *workflows: Workflow, **options: Any) -> Engine:
        return Engine(db, workflows=workflows, observer=self.observer, grace_seconds=0.2, **options)

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def one(self, name: str, **attributes: Any) -> ReadableSpan:
        """Give the span of this name with these attributes; there must be one."""
        wanted = {f"dagresume.{key}": value for key, value in attributes.items()}
        (found,) = [
            s for s in self.spans if s.name == name and wanted.items() <= dict(s.attributes or {}).items()
        ]
        return found

    def parent(self, span: ReadableSpan) -> ReadableSpan | None:
        found = [s for s in self.spans if span.parent and id_of(s) == span.parent.span_id]
        return found[0] if found else None

    def tree(self, *, commits: bool = False) -> str:
        """Give the finished spans as an indented tree."""
        children: dict[int | None, list[ReadableSpan]] = {}
        for span in self.spans:
            children.setdefault(span.parent.span_id if span.parent else None, []).append(span)
        names = {id_of(span): span.name for span in self.spans}
        lines = []

        def show(span: ReadableSpan, depth: int) -> None:
            told = {key: (span.attributes or {}).get(f"dagresume.{key}") for key in SHOWN}
            words = " ".join(f"{key}={value}" for key, value in told.items() if value is not None)
            links = "".join(f" -> {names.get(link.context.span_id, '?')}" for link in span.links)
            lines.append(f"{'  ' * depth}{span.name} {words}".rstrip() + links)
            for child in children.get(id_of(span), []):
                if commits or child.name != "commit":
                    show(child, depth + 1)

        for root in children[None]:
            if commits or root.name != "commit":
                show(root, 0)
        return "\n".join(lines)

    def metric(self, name: str) -> list[tuple[Mapping[str, Any], Any]]:
        """Give the points of a metric: attributes and value, or count of values."""
        data = self.reader.get_metrics_data()
        assert data is not None
        found = [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]
        return [
            (dict(p.attributes or {}), getattr(p, "value", None) or getattr(p, "count", None)) for p in found
        ]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def screening(recorded: Recorded, broken: list[bool]) -> Workflow:
    """A map in threads whose second item fails while `broken` holds something, a sub-workflow, a join."""
    inner = Workflow("review", idempotent=True)

    @inner.node
    def judge(text: str) -> int:
        with recorded.tracer.start_as_current_span("model"):
            return len(text)

    wf = Workflow("screening", idempotent=True, retry=Retry(attempts=2, delay=0.001))

    @wf.node
    async def texts() -> list[str]:
        return ["a", "bb"]

    @wf.node(for_each={"text": "texts"}, concurrency=1)
    def score(text: str) -> int:
        with recorded.tracer.start_as_current_span("parse"):
            if text == "bb" and broken:
                raise ValueError("not yet")
        return len(text)

    wf.subworkflow("check", inner, args={"text": "first"}, depends_on=["score"])

    @wf.node
    async def report(score: list[int], check: int) -> int:
        return sum(score) + check

    return wf


async def test_the_tree_of_a_resumed_run_with_a_map_in_threads(recorded: Recorded, db: Path) -> None:
    broken = [True]
    wf = screening(recorded, broken)
    async with recorded.engine(db, wf) as engine:
        with recorded.tracer.start_as_current_span("request"):
            first = await engine.run(wf, {"first": "x"}, raise_on_failure=False)
    broken.clear()
    async with recorded.engine(db, wf) as engine:
        await engine.resume(first.run_id)
    tree = recorded.tree()
    print(f"\n{recorded.tree(commits=True)}")
    assert tree == dedent("""\
        request
          run screening status=failed reason=node_failed executed=3 reused=0
            texts path=texts status=completed
              attempt texts path=texts attempt=1 status=completed
            score path=score status=failed reason=items_failed
              score path=score[0] status=completed
                attempt score path=score[0] attempt=1 status=completed
                  parse
              score path=score[1] status=failed reason=error
                attempt score path=score[1] attempt=1 status=failed reason=retry
                  parse
                attempt score path=score[1] attempt=2 status=failed reason=error
                  parse
        run screening status=completed executed=3 reused=2 -> run screening
          score path=score status=completed
            score path=score[1] status=completed
              attempt score path=score[1] attempt=3 status=completed
                parse
          check path=check status=completed
            judge path=check/judge status=completed
              attempt judge path=check/judge attempt=1 status=completed
                model
          report path=report status=completed
            attempt report path=report attempt=1 status=completed""")


async def test_every_transaction_has_a_span_below_its_run(recorded: Recorded, db: Path) -> None:
    async with recorded.engine(db) as engine:
        result = await engine.run(flow(), {"alive": ""})
    commits = [span for span in recorded.spans if span.name == "commit"]
    assert len(commits) == result.stats.commits
    run = recorded.one("run traced")
    assert {span.parent and span.parent.span_id for span in commits} == {id_of(run)}
    assert all((span.attributes or {})["dagresume.commit.rows"] for span in commits)


async def test_a_transaction_of_several_runs_links_to_each_of_them(recorded: Recorded, db: Path) -> None:
    async with recorded.engine(db) as engine:
        await asyncio.gather(*(engine.run(flow(), {"alive": ""}) for _ in range(5)))
    runs = {id_of(span) for span in recorded.spans if span.name == "run traced"}
    shared = [span for span in recorded.spans if span.name == "commit" and span.parent is None]
    assert shared
    assert all(len(span.links) > 1 for span in shared)
    assert {link.context.span_id for span in shared for link in span.links} == runs


KILLED = """
    import asyncio, sys
    from opentelemetry.sdk.trace import TracerProvider
    from dagresume import Engine
    from dagresume.otel import OpenTelemetry
    from tests.extras.traced import flow

    async def main():
        async with Engine(sys.argv[1], observer=OpenTelemetry(tracer_provider=TracerProvider())) as engine:
            await engine.run(flow(), {"alive": sys.argv[2]}, key="k")

    asyncio.run(main())
"""


async def test_a_run_that_was_killed_is_linked_to_by_the_one_that_goes_on(
    recorded: Recorded, db: Path, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    command = [sys.executable, "-c", dedent(KILLED), str(db), str(alive)]
    done = await asyncio.to_thread(subprocess.run, command, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -9
    killed = alive.read_text()
    alive.unlink()
    async with recorded.engine(db) as engine:
        await engine.run(flow(), {"alive": str(alive)}, key="k")
    run = recorded.one("run traced")
    assert [format(link.context.trace_id, "032x") for link in run.links] == [killed]
    assert (run.attributes or {})["dagresume.reused"] == 4  # the list, the map and its two items


async def test_a_body_in_another_process_is_in_the_same_trace(recorded: Recorded, db: Path) -> None:
    wf = Workflow("processes", idempotent=True)
    wf.node(executor="process")(compute)
    async with recorded.engine(db) as engine:
        result = await engine.run(wf, {"n": 1})
    context = recorded.one("attempt compute").get_span_context()
    assert context is not None
    assert result["compute"] == format(context.trace_id, "032x")


async def test_items_that_run_at_once_do_not_see_each_others_spans(recorded: Recorded, db: Path) -> None:
    wf = Workflow("siblings", idempotent=True)
    barrier = asyncio.Barrier(8)

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int) -> int:
        with recorded.tracer.start_as_current_span(f"inside {n}"):
            await barrier.wait()
        return trace.get_current_span().get_span_context().span_id

    async with recorded.engine(db) as engine:
        result = await engine.run(wf, {"numbers": list(range(8))})
    for n, seen in enumerate(result["item"]):
        attempt = recorded.one("attempt item", path=f"item[{n}]")
        assert seen == id_of(attempt)
        assert recorded.parent(recorded.one(f"inside {n}")) is attempt


class Open(SpanProcessor):
    """Counts the spans that are open at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

    def on_end(self, span: Any) -> None:
        self.now -= 1


async def test_a_wide_map_has_no_more_open_spans_than_bodies(db: Path) -> None:
    provider, counted = TracerProvider(), Open()
    provider.add_span_processor(counted)
    observer = OpenTelemetry(tracer_provider=provider)
    wf = Workflow("wide", idempotent=True)

    @wf.node(for_each={"n": "numbers"})
    async def item(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async with Engine(db, observer=observer, concurrency=10) as engine:
        await engine.run(wf, {"numbers": list(range(4000))})
    assert counted.most < 2 * (3 * MAX_ROWS + 10) + 10, "until they are durable: what waits to be written"
    assert counted.now == 0
    assert not observer._drives


async def run_badly(engine: Engine, wf: Workflow, how: str) -> RunResult:
    handle = await engine.start(wf)
    if how == "cancelled":
        await asyncio.sleep(0.05)
        await handle.cancel("ann")
    return await handle.result(raise_on_failure=False)


@pytest.mark.parametrize("how", ["cancelled", "timeout", "shutdown"])
async def test_spans_end_however_a_run_ends(recorded: Recorded, db: Path, how: str) -> None:
    wf = Workflow("slow", idempotent=True)

    @wf.node(timeout=0.05 if how == "timeout" else None)
    async def slow() -> None:
        await asyncio.sleep(60)

    async with recorded.engine(db) as engine:
        if how == "shutdown":
            handle = await engine.start(wf)
            await asyncio.sleep(0.05)
        else:
            await run_badly(engine, wf, how)
    if how == "shutdown":
        await handle.result(raise_on_failure=False)
    status = {"cancelled": "cancelled", "timeout": "failed", "shutdown": "interrupted"}[how]
    assert recorded.one("run slow", status=status).end_time
    assert recorded.one("slow", status=status).end_time
    attempt = recorded.one("attempt slow", status=status)
    assert attempt.status.status_code is (StatusCode.ERROR if how == "timeout" else StatusCode.UNSET)


async def test_spans_end_when_a_commit_fails(recorded: Recorded, db: Path) -> None:
    faults = Faults()
    faults.refuse(3)
    async with faults.engine(db, observer=recorded.observer) as engine:
        with pytest.raises(Exception, match="no space left"):
            await engine.run(flow(), {"alive": ""})
    run = recorded.one("run traced")
    assert run.status.status_code is StatusCode.ERROR
    assert [span for span in recorded.spans if (span.attributes or {}).get("dagresume.commit.refused")]
    assert not recorded.observer._drives


class Broken:
    """An observer that raises whatever it is told."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*args: Any) -> Any:
            raise RuntimeError(name)

        return fail


class BrokenLater(Broken):
    def commits(self, units: Sequence[Unit]) -> Callable[[Sequence[Outcome]], None]:
        def told(outcomes: Sequence[Outcome]) -> None:
            raise RuntimeError("told")

        return told


@pytest.mark.parametrize("observer", [Broken(), BrokenLater()])
async def test_an_observer_that_raises_changes_nothing_of_a_run(
    db: Path, observer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(db, observer=observer) as engine:
        result = await engine.run(flow(), {"alive": ""})
    assert result["total"] == 6
    assert "an observer raised an error" in caplog.text


async def test_errors_are_told_and_secrets_are_not(recorded: Recorded, db: Path) -> None:
    wf = Workflow("secret", secrets=("token",), idempotent=True)

    @wf.node
    async def call(token: str) -> None:
        raise ValueError(f"refused: {token}")

    async with recorded.engine(db) as engine:
        with pytest.raises(RunFailed):
            await engine.run(wf, {"token": "hunter2-hunter2"})
    attempt = recorded.one("attempt call")
    (event,) = attempt.events
    told = dict(event.attributes or {})
    assert told["exception.type"] == "ValueError"
    assert told["exception.message"] == "refused: ***"
    assert "hunter2" not in repr([(span.attributes, span.events) for span in recorded.spans])


async def test_usage_stands_on_the_attempt(recorded: Recorded, db: Path) -> None:
    wf = Workflow("paid")

    @wf.node
    async def call(ctx: Context) -> int:
        ctx.usage(tokens_in=3, cost=0.5)
        return 1

    async with recorded.engine(db) as engine:
        await engine.run(wf)
    told = recorded.one("attempt call").attributes or {}
    assert (told["dagresume.usage.tokens_in"], told["dagresume.usage.cost"]) == (3, 0.5)


async def test_what_waits_has_a_span_until_somebody_answers(recorded: Recorded, db: Path) -> None:
    wf = Workflow("asks")
    wf.approval("ok", prompt="?", depends_on=[])
    async with recorded.engine(db, wf) as engine:
        waiting = await engine.run(wf)
        await engine.decide(waiting.run_id, "ok", by="ann")
        await engine.resume(waiting.run_id)
    spans = [span for span in recorded.spans if span.name == "ok"]
    assert [(span.attributes or {})["dagresume.status"] for span in spans] == ["waiting", "completed"]


async def test_undoing_has_spans_too(recorded: Recorded, db: Path) -> None:
    seen = []

    async def undo(output: int, ctx: Context) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    wf = Workflow("undone")

    @wf.node(compensate=undo)
    async def book() -> int:
        return 1

    async with recorded.engine(db, wf) as engine:
        result = await engine.run(wf)
        await engine.rollback(result.run_id)
    undone = recorded.one("undo book")
    assert seen == [id_of(undone)]
    assert (undone.attributes or {})["dagresume.status"] == "compensated"
    run = recorded.one("undo undone", status="rolled_back")
    assert [link.context.span_id for link in run.links] == [id_of(recorded.one("run undone"))]


async def test_metrics_count_what_happened(recorded: Recorded, db: Path) -> None:
    broken = [True]
    wf = screening(recorded, broken)
    async with recorded.engine(db, wf) as engine:
        first = await engine.run(wf, {"first": "x"}, raise_on_failure=False)
        broken.clear()
        second = await engine.resume(first.run_id)
    runs = {told["dagresume.status"]: value for told, value in recorded.metric("dagresume.runs")}
    assert runs == {"failed": 1, "completed": 1}
    assert sum(value for _, value in recorded.metric("dagresume.attempts")) == 7
    assert sum(value for _, value in recorded.metric("dagresume.retries")) == 2
    assert sum(value for _, value in recorded.metric("dagresume.recoveries")) == 1
    commits = first.stats.commits + second.stats.commits
    assert recorded.metric("dagresume.commit.duration")[0][1] == commits
    assert recorded.metric("dagresume.commit.rows")[0][1] == commits
    completed = [
        v for told, v in recorded.metric("dagresume.nodes") if told["dagresume.status"] == "completed"
    ]
    assert sum(completed) == 7  # texts, two items and their map, judge and check, report
    assert recorded.metric("dagresume.checkpoint.latency")[0][1] == 5


async def test_an_instrumentor_observes_engines_made_after_it(recorded: Recorded, db: Path) -> None:
    instrumentor = Instrumentor()
    instrumentor.instrument(tracer_provider=recorded.provider, meter_provider=recorded.meters)
    try:
        async with Engine(db) as engine:
            await engine.run(flow(), {"alive": ""})
    finally:
        instrumentor.uninstrument()
    before = len(recorded.spans)
    assert recorded.one("run traced").end_time
    async with Engine(db) as engine:
        await engine.run(flow(), {"alive": ""})
    assert len(recorded.spans) == before


def test_the_page_names_every_attribute_and_instrument() -> None:
    named = set(re.findall(r"`(dagresume\.[a-z_.]+)`", PAGE.read_text(encoding="utf-8")))
    assert named == {*ATTRIBUTES, *INSTRUMENTS}


ABSENT = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "opentelemetry":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
    import dagresume.otel
    from dagresume import Engine
    Engine(":memory:")
    try:
        dagresume.otel.OpenTelemetry
    except ImportError as error:
        print(error)
"""


def test_without_the_library_the_module_imports_and_says_what_to_install() -> None:
    command = [sys.executable, "-c", dedent(ABSENT)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "OpenTelemetry is not installed: pip install 'dagresume[otel]'\n"


def test_the_engine_alone_loads_nothing_of_it() -> None:
    script = (
        "import sys; from dagresume import Engine; Engine(':memory:'); print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
