"""Restate: its own server on this machine, made for one run, with a service in this process.

RESTATE_SERVER: the path of its binary (npm: @restatedev/restate-server).
"""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import harness
import httpx
import hypercorn
import hypercorn.asyncio
import restate
from harness import check, clock, last, main

SERVER = os.environ.get("RESTATE_SERVER", "restate-server")
INGRESS, ADMIN, NODE, SERVICE = 58080, 59070, 55122, 59080
HOST = "127.0.0.1"
service = restate.Service("Bench")
PATIENCE = timedelta(minutes=10)


async def follow(x: int) -> int:
    return harness.step(x)


async def join(count: int) -> int:
    return last(count)


@service.handler(inactivity_timeout=PATIENCE, abort_timeout=PATIENCE)
async def it(ctx: restate.Context, asked: dict) -> int:
    steps = asked["steps"]
    if asked["work"] == "chain":
        x = -1
        for _ in range(steps):
            x = await ctx.run_typed("follow", follow, x=x)
        return x
    results = await restate.gather(*[ctx.run_typed("follow", follow, x=number) for number in range(steps)])
    return await ctx.run_typed("join", join, count=len(results))


def die_with_parent() -> None:
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)


def serve(folder: Path) -> subprocess.Popen[bytes]:
    places = {
        "RESTATE_INGRESS__BIND_ADDRESS": f"{HOST}:{INGRESS}",
        "RESTATE_ADMIN__BIND_ADDRESS": f"{HOST}:{ADMIN}",
        "RESTATE_LOG_FILTER": "error",
        "RESTATE_DISABLE_TELEMETRY": "true",
    }
    command = [SERVER, "--base-dir", f"{folder}/server", "--node-name", "n1", "--listen-mode", "tcp"]
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--bind-address", f"{HOST}:{NODE}", "--no-logo"],
            env={**os.environ, **places},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )


async def ready(client: httpx.AsyncClient) -> None:
    health = (f"http://{HOST}:{ADMIN}/health", f"http://{HOST}:{INGRESS}/restate/health")
    for _ in range(1200):
        try:
            if [(await client.get(place)).status_code for place in health] == [200, 200]:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.05)
    raise SystemExit("the server does not answer")


async def run(work: str, steps: int, folder: Path, again: bool) -> float:
    logging.disable(logging.CRITICAL)
    config = hypercorn.Config()
    config.bind, config.loglevel = [f"{HOST}:{SERVICE}"], "CRITICAL"
    config.h2_max_concurrent_streams = 2147483647
    serving = asyncio.create_task(hypercorn.asyncio.serve(restate.app([service]), config))
    server = serve(folder)
    harness.before_death(server.kill)
    async with httpx.AsyncClient(timeout=170) as client:
        await ready(client)
        place = f"http://{HOST}:{INGRESS}/Bench/it"
        if not again:
            made = await client.post(
                f"http://{HOST}:{ADMIN}/deployments", json={"uri": f"http://{HOST}:{SERVICE}"}
            )
            made.raise_for_status()
            await client.post(place, json={"work": "chain", "steps": 1})  # warms it up
            harness.ran = 0
        begun = clock()
        asked = {"work": work, "steps": steps}
        answer = await client.post(place, json=asked, headers={"idempotency-key": "it"})
        taken = clock() - begun
    answer.raise_for_status()
    check(answer.json(), steps - 1 if work == "chain" else steps)
    serving.cancel()
    return taken


if __name__ == "__main__":
    told = subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True).stdout
    main("restate-sdk", run, beside=f"(SDK), server {told.split()[1]}")
