"""kairo-sdk, embedded, on its SQLite store as it comes (WAL, synchronous=FULL); its steps may run again."""

import asyncio
import logging
from pathlib import Path

from harness import check, clock, last, main, step
from kairo_sdk import EmbeddedBackend, Kairo, SQLiteStore

logging.disable(logging.CRITICAL)


async def run(work: str, steps: int, folder: Path, again: bool) -> float:
    # It has a name, so that the next process takes its leases over at once and does not wait for their end.
    kairo = Kairo(backend=await EmbeddedBackend.open(SQLiteStore(f"{folder}/kairo.db"), owner="bench"))

    @kairo.action("follow", effect="unprotected")
    async def follow(x, ctx):
        return step(x)

    @kairo.action("join", effect="unprotected")
    async def join(count, ctx):
        return last(count)

    @kairo.workflow("it")
    async def it(ctx, steps):
        if work == "chain":
            x = -1
            for _ in range(steps):
                x = await ctx.call("follow", x)
            return x
        results = await asyncio.gather(*[ctx.call("follow", number) for number in range(steps)])
        return await ctx.call("join", len(results))

    await kairo.start()
    begun = clock()
    found = await kairo.run("it", steps, id="it")
    taken = clock() - begun
    check(found, steps - 1 if work == "chain" else steps)
    return taken


if __name__ == "__main__":
    main("kairo-sdk", run)
