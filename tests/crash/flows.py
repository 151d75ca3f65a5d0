"""Workflows that the crash tests kill. The effect of a body is a line in a file: the world outside."""

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagresume import NOT_DONE, Context, Retry, Value, Workflow

WORLD = Path("world.log")


def leave(line: str, file: Path = WORLD) -> None:
    """Append a line, at once and whole."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def world(folder: Path = Path()) -> list[str]:
    """What has happened outside, in order."""
    file = folder / WORLD
    return file.read_text().splitlines() if file.exists() else []


def first_time(path: str) -> bool:
    """Leave a line for this path; say whether it is the first one.

    The number of the attempt does not tell: the start record of an idempotent path is written a little later.
    """
    leave(path)
    return [line.split()[0] for line in world()].count(path) == 1


async def work(ctx: Context, value: int) -> int:
    """Have the effect of a path, and say so a moment later."""
    await asyncio.sleep(0.001)
    leave(f"{ctx.path} {value}")
    await asyncio.sleep(0.001)
    return value


async def look(ctx: Context) -> Any:
    """Find out from the outside world what an attempt did."""
    done = dict(line.split(" ") for line in world())
    return int(done[ctx.path]) if ctx.path in done else NOT_DONE


def diamond(*, idempotent: bool, reconcile: Callable[..., Any] | None = None) -> Workflow:
    """Six nodes: a diamond (a, b, c, d), a map over what a gave, a node that fails at first, and a sink."""
    wf = Workflow("diamond", idempotent=idempotent)

    async def numbers(ctx: Context, start: int) -> list[int]:
        return [start, await work(ctx, start + 1), start + 2]

    async def flaky(a: list[int], ctx: Context) -> int:
        if ctx.attempt == 1:
            raise ConnectionError("the first attempt fails")
        return await work(ctx, sum(a))

    async def left(a: list[int], ctx: Context) -> int:
        return await work(ctx, a[0])

    async def join(b: int, c: int, ctx: Context) -> int:
        return await work(ctx, b + c)

    async def item(n: int, ctx: Context) -> int:
        return await work(ctx, 10 * n)

    async def sink(d: int, m: list[int], ctx: Context) -> int:
        return await work(ctx, d + sum(m))

    async def look_for_numbers(start: int, ctx: Context) -> Any:
        found = await look(ctx)
        return found if found is NOT_DONE else [start, found, start + 2]

    known = reconcile is not None
    wf.node(id="a", reconcile=look_for_numbers if known else None)(numbers)
    wf.node(id="b", reconcile=reconcile, retry=Retry(2, delay=0.002))(flaky)
    wf.node(id="c", reconcile=reconcile)(left)
    wf.node(id="d", reconcile=reconcile)(join)
    wf.node(id="m", reconcile=reconcile, for_each={"n": "a"}, concurrency=2)(item)
    wf.node(id="e", reconcile=reconcile)(sink)
    return wf


idempotent = diamond(idempotent=True)
careful = diamond(idempotent=False)
asking = diamond(idempotent=False, reconcile=look)


def chain(*, idempotent: bool, die_in: str | None = None) -> Workflow:
    """a → b → c; `die_in`: this node kills its process the first time."""
    wf = Workflow("chain", idempotent=idempotent)

    async def step(ctx: Context) -> str:
        if first_time(ctx.path) and ctx.path == die_in:
            die()
        return ctx.path

    for node, above in (("a", ()), ("b", ("a",)), ("c", ("b",))):
        wf.node(id=node, depends_on=above)(step)
    return wf


def die() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


safe_a, unsafe_a = chain(idempotent=True, die_in="a"), chain(idempotent=False, die_in="a")
safe_c, unsafe_c = chain(idempotent=True, die_in="c"), chain(idempotent=False, die_in="c")

# -- a big output ---------------------------------------------------------------------------------------

big = Workflow("big", idempotent=True)


@big.node
async def report(ctx: Context) -> str:
    leave(f"report {ctx.attempt}")
    return str(len(world())) * 100_000  # another one each time


@big.node
async def size(report: str) -> list[Any]:
    return [len(report), report[0]]


# -- a job outside that outlives us ---------------------------------------------------------------------

outside = Workflow("outside", idempotent=True)
JOB = "sleep 0.2; echo job {key} >> world.log"


def begin_job(key: str) -> None:
    """Begin something outside that does not end with us."""
    subprocess.Popen(["sh", "-c", JOB.format(key=key)], start_new_session=True)


@outside.node
async def order(ctx: Context) -> str:
    key = ctx.idempotency_key
    if f"job {key}" in world():
        leave(f"order {ctx.attempt} {key}")
        return "done already"
    begin_job(key)
    leave(f"order {ctx.attempt} {key}")
    await asyncio.sleep(60)
    return "never"


# -- a failure beside a long branch ---------------------------------------------------------------------

branches = Workflow("branches", idempotent=True)


@branches.node(id="a")
async def first(ctx: Context) -> None:
    leave("begin a")
    leave("end a")


@branches.node(id="b", depends_on="a")
async def failing(ctx: Context) -> None:
    leave("begin b")
    if ctx.attempt == 1:
        raise ConnectionError("the first attempt fails")
    leave("end b")


@branches.node(id="d", depends_on="a")
async def long(ctx: Context) -> None:
    leave("begin d")
    if world().count("begin d") == 1:
        await asyncio.sleep(60)
    await asyncio.sleep(0.05)
    leave("end d")


@branches.node(id="c", depends_on=["b", "d"])
async def last(ctx: Context) -> None:
    leave("begin c")
    leave("end c")


# -- maps -----------------------------------------------------------------------------------------------


def ten(*, idempotent: bool) -> Workflow:
    """A map over ten; the items 2 and 3 stay inside their bodies the first time."""
    wf = Workflow("ten", idempotent=idempotent)

    @wf.node(id="m", for_each={"n": "numbers"})
    async def item(n: int, ctx: Context) -> int:
        if first_time(ctx.path) and n in (2, 3):
            await asyncio.sleep(60)
        return n * n

    @wf.node(args={"squares": "m"}, idempotent=True)
    async def total(squares: list[int], ctx: Context) -> int:
        leave(f"total {len(squares)}")
        return sum(squares)

    return wf


safe_ten, unsafe_ten = ten(idempotent=True), ten(idempotent=False)

late = Workflow("late", idempotent=True)


@late.node
async def source(count: int, ctx: Context) -> list[int]:
    leave(f"source {ctx.attempt}")
    if ctx.attempt == 1:
        raise ConnectionError("the first attempt fails")
    return list(range(count))


@late.node(for_each={"n": "source"})
async def each(n: int, ctx: Context) -> int:
    leave(ctx.path)
    return n


@late.node(args={"values": "each"})
async def whole(values: list[int]) -> int:
    leave("whole")
    return len(values)


pairs = Workflow("pairs", idempotent=True)


@pairs.node(for_each={"n": "numbers"})
async def draw(n: int, ctx: Context) -> float:
    """Something that comes out differently each time."""
    value = random.random()
    leave(f"{ctx.path} {value}")
    return value


@pairs.node(for_each={"value": "draw"})
async def keep(value: float, ctx: Context) -> float:
    if first_time(ctx.path) and ctx.index == 2:
        await asyncio.sleep(60)
    return value


many = Workflow("many", idempotent=True)


@many.node(for_each={"n": "numbers"}, concurrency=8)
async def slowly(n: int, ctx: Context) -> str:
    leave(ctx.path)
    await asyncio.sleep(0.02)
    return f"item {n}"


# -- time -----------------------------------------------------------------------------------------------


async def attempt(ctx: Context) -> None:
    leave(f"{ctx.attempt} {time.monotonic()}")
    raise ConnectionError("it never works")


hopeless, hopeless_slowly = Workflow("hopeless", idempotent=True), Workflow("hopeless", idempotent=True)
hopeless.node(retry=Retry(3, delay=0.2, backoff=1, jitter=0))(attempt)
hopeless_slowly.node(retry=Retry(3, delay=1.0, backoff=1, jitter=0))(attempt)


patient = Workflow("patient", idempotent=True)


async def pause(ctx: Context) -> str:
    leave(f"{ctx.path} {os.getpid()}")
    await asyncio.sleep(0.15)
    return ctx.path


for _node, _above in (("a", ()), ("b", ("a",)), ("c", ("b",)), ("d", ("c",))):
    patient.node(id=_node, depends_on=_above)(pause)


# -- a bit of everything --------------------------------------------------------------------------------


def mixed(*, idempotent: bool, reconcile: Callable[..., Any] | None = None) -> Workflow:
    """A pure node, two chained maps with a failed item, a big output, a thread, a failure that is handled."""
    wf = Workflow("mixed", idempotent=idempotent)

    @wf.node(checkpoint=False, idempotent=True)
    async def pure(start: int) -> list[int]:
        return [start + k for k in range(4)]

    @wf.node(for_each={"n": "pure"}, concurrency=3, tolerate=1, reconcile=reconcile)
    async def above(n: int, ctx: Context) -> int:
        if ctx.index == 2:
            raise ValueError("this one never works")
        return await work(ctx, n)

    @wf.node(for_each={"value": "above"}, reconcile=reconcile)
    async def below(value: int, ctx: Context) -> int:
        ctx.usage(tokens_in=1)
        return await work(ctx, value + 1)

    @wf.node(idempotent=True)
    def in_thread(pure: list[int], ctx: Context) -> str:
        ctx.log.info("a line")
        return "x" * 66_000

    @wf.node(reconcile=reconcile)
    async def bad(in_thread: str, ctx: Context) -> int:
        raise ValueError("this never works either")

    @wf.node(depends_on="bad", trigger="any_failed", reconcile=reconcile)
    async def handle(ctx: Context) -> int:
        return await work(ctx, len(ctx.failures))

    @wf.node(depends_on="in_thread", trigger="any_failed")
    async def not_needed() -> None:
        leave("not_needed")

    @wf.node(depends_on="not_needed", reconcile=reconcile)
    async def end(below: list[Any], handle: int, pure: list[int], ctx: Context) -> int:
        return await work(ctx, handle + len(pure) + sum(value for value in below if isinstance(value, int)))

    return wf


mixed_idempotent = mixed(idempotent=True)
mixed_careful = mixed(idempotent=False)
mixed_asking = mixed(idempotent=False, reconcile=look)

# -- what bodies have kept while they run ----------------------------------------------------------------


def bank(*, idempotent: bool) -> Workflow:
    """Nodes that book into a table of their own beside nodes that do not; one booking fails at first."""
    wf = Workflow("bank", idempotent=idempotent)

    @wf.node
    async def table(ctx: Context, start: int) -> list[int]:
        ctx.commit_with("CREATE TABLE IF NOT EXISTS ledger(path TEXT PRIMARY KEY, amount INTEGER)")
        ctx.commit_with("INSERT INTO ledger VALUES (?, ?)", [ctx.path, start])
        return [start, start + 1, start + 2]

    @wf.node
    async def beside(ctx: Context, start: int) -> int:
        return await work(ctx, start)

    @wf.node(for_each={"amount": "table"}, retry=Retry(2, delay=0.002))
    async def book(amount: int, ctx: Context) -> int:
        ctx.commit_with("INSERT INTO ledger VALUES (?, ?)", [ctx.path, amount])
        if amount == 6 and first_time("refused"):
            ctx.commit_with("INSERT INTO ledger VALUES (?, ?)", [ctx.path, amount])
        return amount

    @wf.node(for_each={"n": "table"})
    async def item(n: int, ctx: Context) -> int:
        return await work(ctx, n)

    @wf.node
    async def end(book: list[int], item: list[int], beside: int, ctx: Context) -> int:
        total = sum(book) + sum(item) + beside
        ctx.commit_with("INSERT INTO ledger VALUES (?, ?)", [ctx.path, total])
        return total

    return wf


safe_bank, unsafe_bank = bank(idempotent=True), bank(idempotent=False)


def keeper(*, idempotent: bool, die_at: str | None = None) -> Workflow:
    """Two nodes that make paid calls once and save what they did; `die_at`: there, the first time."""
    wf = Workflow("keeper", idempotent=idempotent, retry=Retry(2, delay=0.002))

    def here(place: str) -> None:
        if place == die_at and first_time(place):
            die()

    async def pay(ctx: Context, what: str) -> str:
        leave(f"paid {what} {ctx.path}")
        here("in-call")
        return f"receipt for {what}"

    @wf.node
    async def pages(ctx: Context) -> list[str]:
        done = list(ctx.state or [])
        leave(f"from {len(done)}")
        leave(f"files {len(list(ctx.artifacts.iterdir()))}")
        (ctx.artifacts / "part").write_text("x")
        for page in range(len(done), 4):
            done.append(await ctx.once(f"page {page}", pay, ctx, f"page{page}"))
            here("before-state")
            await ctx.save_state(done)
            here(f"after-{page}")
        return done

    @wf.node
    async def total(pages: list[str], ctx: Context) -> str:
        found = await ctx.once("total", pay, ctx, "total", scope="workflow")
        return f"{found}, {len(pages)} pages"

    return wf


safe_keeper, unsafe_keeper = keeper(idempotent=True), keeper(idempotent=False)
safe_in_call, unsafe_in_call = (keeper(idempotent=i, die_at="in-call") for i in (True, False))
before_state = keeper(idempotent=True, die_at="before-state")
safe_after_page, unsafe_after_page = (keeper(idempotent=i, die_at="after-2") for i in (True, False))


files = Workflow("files", idempotent=True)


@files.node
async def leaves(ctx: Context) -> int:
    """Leave a file and die before anything of this attempt is written."""
    found = len(list(ctx.artifacts.iterdir()))
    (ctx.artifacts / "part").write_text("x")
    if first_time("leaves"):
        die()
    return found


# -- what can be undone ---------------------------------------------------------------------------------


def is_broken() -> bool:
    return Path("broken").exists() and not Path("mended").exists()


def undoable(on_failure: Any = None) -> Workflow:
    """A diamond, a map, a loop and an inner workflow, all of which can be undone, and a node that fails.

    The undo of c fails until there is a file `mended`, if there is one called `broken`.
    """
    wf = Workflow("undoable", on_failure=on_failure)

    async def undo(output: Any, ctx: Context) -> None:
        leave(f"undoing {ctx.path} {ctx.idempotency_key}")
        await asyncio.sleep(0.001)
        if ctx.path == "c" and is_broken():
            raise ConnectionError("the undo of c fails")
        leave(f"undone {ctx.path} {output}")

    async def numbers() -> list[int]:
        return [1, 2, 3]

    async def step(ctx: Context) -> str:
        return ctx.path

    async def item(n: int) -> int:
        return n

    async def grow(state: int) -> int:
        return state + 1

    async def fails() -> None:
        raise ConnectionError("the end fails")

    inner = Workflow("inner")
    inner.node(id="x", compensate=undo)(step)
    inner.node(id="y", depends_on="x", compensate=undo)(step)
    wf.node(id="a", compensate=undo)(numbers)
    wf.node(id="b", depends_on="a", compensate=undo)(step)
    wf.node(id="c", depends_on="a", compensate=undo)(step)
    wf.node(id="d", depends_on=("b", "c"), compensate=undo)(step)
    wf.node(id="m", for_each={"n": "a"}, depends_on="d", compensate=undo)(item)
    wf.loop(
        "l", grow, initial=Value(0), until=lambda s: s == 2, max_iterations=3, depends_on="m", compensate=undo
    )
    wf.subworkflow("s", inner, depends_on="l")
    wf.node(id="end", depends_on="s")(fails)
    return wf


undone_by_hand = undoable()
undoes_itself = undoable("rollback")

# -- graphs inside nodes, loops, conditions, waits ------------------------------------------------------


async def undo(output: Any, ctx: Context) -> None:
    """Leave a line that says what was undone."""
    leave(f"undone {ctx.path}")


def ways(*, idempotent: bool, reconcile: Callable[..., Any] | None = None, undoes: bool = False) -> Workflow:
    """A map of sub-workflows with a loop, a condition and an approval in them; a sleep; a loop that waits.

    `undoes`: its end fails, and it undoes what it has done.
    """
    back: dict[str, Any] = {"compensate": undo} if undoes else {}
    wf, inner, asks = (
        Workflow("ways", idempotent=idempotent, on_failure="rollback" if undoes else None),
        Workflow("inner", output="end"),
        Workflow("asks"),
    )

    async def first(n: int, ctx: Context) -> int:
        return await work(ctx, n)

    async def again(state: int, ctx: Context) -> int:
        return await work(ctx, state + 1)

    async def extra(refine: int, ctx: Context) -> int:
        return await work(ctx, 10 * refine)

    async def end(refine: int, extra: int | None, ctx: Context) -> int:
        return await work(ctx, refine + (extra or 0))

    async def listed(start: int, ctx: Context) -> list[int]:
        return [0, await work(ctx, start)]

    async def keep(add: int, ctx: Context) -> int:
        return await work(ctx, add)

    async def total(each: list[int], asking: int, ctx: Context) -> int:
        if undoes:
            raise ConnectionError("the end fails")
        return await work(ctx, sum(each) + asking)

    async def look_for_list(start: int, ctx: Context) -> Any:
        found = await look(ctx)
        return found if found is NOT_DONE else [0, found]

    known = reconcile is not None
    back["reconcile"] = reconcile
    inner.node(id="a", **back)(first)
    inner.loop("refine", again, initial="a", until=lambda state: state >= 2, max_iterations=5, **back)
    inner.node(id="extra", when=lambda refine: refine > 2, **back)(extra)
    inner.approval("ap", depends_on="refine")
    inner.node(id="end", depends_on="ap", **back)(end)

    asks.node(id="add", **back)(again)
    asks.wait_for("heard", "go", depends_on="add")
    asks.node(id="keep", depends_on="heard", **back)(keep)

    wf.node(id="items", **back | {"reconcile": look_for_list if known else None})(listed)
    wf.subworkflow("each", inner, for_each={"n": "items"})
    wf.loop("asking", asks, initial=Value(0), until=lambda state: state == 2, max_iterations=3)
    wf.sleep("nap", 0.02, depends_on="each")
    wf.node(id="total", depends_on="nap", reconcile=reconcile)(total)
    return wf


def inside() -> Workflow:
    """A map of sub-workflows of two nodes and a loop, nothing of it idempotent; nothing waits."""
    wf, inner = Workflow("inside"), Workflow("inner")

    async def first(n: int, ctx: Context) -> int:
        return await work(ctx, n)

    async def again(state: int, ctx: Context) -> int:
        return await work(ctx, state + 1)

    inner.node(id="a")(first)
    inner.loop("refine", again, initial="a", until=lambda state: state >= 5, max_iterations=5)
    wf.subworkflow("each", inner, for_each={"n": "numbers"})
    return wf


ways_idempotent = ways(idempotent=True)
ways_careful = ways(idempotent=False)
ways_asking = ways(idempotent=False, reconcile=look)
ways_undone = ways(idempotent=True, undoes=True)

# -- a definition that has changed ----------------------------------------------------------------------


def versions(*, idempotent: bool, reconcile: Callable[..., Any] | None = None) -> tuple[Workflow, Workflow]:
    """A chain with a map in two versions; the newer one renames a node, drops one and has another output."""
    old, new = (Workflow("versions", version=v, idempotent=idempotent) for v in "12")

    async def first(start: int, ctx: Context) -> int:
        return await work(ctx, start)

    async def items(first: int, ctx: Context) -> list[int]:
        return [first, await work(ctx, first + 1)]

    async def gone(ctx: Context) -> int:
        return await work(ctx, 0)

    async def each(n: int, ctx: Context) -> int:
        return await work(ctx, 10 * n)

    async def last(each: list[int], ctx: Context) -> int:
        return await work(ctx, sum(each))

    async def look_for_items(first: int, ctx: Context) -> Any:
        found = await look(ctx)
        return found if found is NOT_DONE else [first, found]

    lists = None if reconcile is None else look_for_items
    old.node(reconcile=reconcile)(first)
    old.node(id="listed", reconcile=lists)(items)
    old.node(depends_on="first", reconcile=reconcile)(gone)
    old.node(for_each={"n": "listed"}, reconcile=reconcile)(each)
    old.node(reconcile=reconcile)(last)
    new.node(reconcile=reconcile)(first)
    new.node(id="items", reconcile=lists)(items)
    new.node(for_each={"n": "items"}, reconcile=reconcile)(each)
    new.node(reconcile=reconcile)(last)
    new.migrate("1", rename={"listed": "items"}, drop="gone")
    return old, new


old_idempotent, new_idempotent = versions(idempotent=True)
old_careful, new_careful = versions(idempotent=False)
old_asking, new_asking = versions(idempotent=False, reconcile=look)
