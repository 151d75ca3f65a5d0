"""DBOS Transact for Python on its SQLite store, as it comes: an async workflow of async steps."""

import asyncio
from pathlib import Path

from dbos import DBOS, SetWorkflowID
from harness import check, clock, last, main, step


@DBOS.step()
async def follow(x: int) -> int:
    return step(x)


@DBOS.step()
async def join(count: int) -> int:
    return last(count)


@DBOS.workflow()
async def chain(steps: int) -> int:
    x = -1
    for _ in range(steps):
        x = await follow(x)
    return x


@DBOS.workflow()
async def fanout(steps: int) -> int:
    results = await asyncio.gather(*[follow(number) for number in range(steps)])
    return await join(len(results))


async def run(work: str, steps: int, folder: Path, again: bool) -> float:
    DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{folder}/dbos.db",
            "run_admin_server": False,
            "log_level": "CRITICAL",
            "executor_id": "bench",
            "application_version": "1",
        }
    )
    begun = clock()
    DBOS.launch()  # takes up what an earlier process of this executor has left
    if again:
        found = await (await DBOS.retrieve_workflow_async("it")).get_result()
    else:
        begun = clock()
        with SetWorkflowID("it"):
            found = await (chain if work == "chain" else fanout)(steps)
    taken = clock() - begun
    check(found, steps - 1 if work == "chain" else steps)
    return taken


if __name__ == "__main__":
    main("dbos", run)
