"""How `DaskWorkers` behaves with a thousand workers that die: Dask's real scheduler and client, and real workers in one
process whose items only sleep. docs/scale.md has the figures.

    python scripts/simulate_workers.py --workers 1000 --items 20000 --seconds 5 --deaths 200
"""

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import tempfile
import time
from multiprocessing import Pipe, Process

import dask

from bitnet_ref.system.workers import DaskWorkers

SETTINGS = {
    "distributed.scheduler.worker-ttl": None,  # a thousand workers share one event loop here: heartbeats come late
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "600s",
    "distributed.comm.timeouts.connect": "120s",
    "distributed.comm.timeouts.tcp": "600s",  # the event loop of a thousand workers does not always read in 30 s
    "logging": {"distributed": "critical"},
}
STARTED_TOGETHER = 50


def sleep(_, item):
    number, seconds = item
    time.sleep(seconds)
    return number


def run_process(arguments, pipe):
    dask.config.set({**SETTINGS, "temporary-directory": tempfile.mkdtemp(prefix="bitnet-ref-workers-")})
    asyncio.run(run_cluster(arguments, pipe))


async def run_cluster(arguments, pipe):
    """The scheduler and its workers; at random times a worker loses its connection, and another one joins."""
    from distributed import Scheduler, Worker

    async def start():
        return await Worker(facts["address"], nthreads=1, memory_limit=0, dashboard=False, heartbeat_interval="60s")

    chosen, began, facts = random.Random(arguments.seed), time.perf_counter(), {"deaths": 0, "queued": 0}
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
        facts["address"], workers = scheduler.address, []
        while len(workers) < arguments.workers:
            workers += await asyncio.gather(*(start() for _ in range(min(STARTED_TOGETHER, arguments.workers))))
        facts["start_s"] = time.perf_counter() - began
        pipe.send(facts["address"])
        pause = arguments.items * arguments.seconds / arguments.workers / (arguments.deaths + 1)
        while not pipe.poll():
            await asyncio.sleep(pause)
            if facts["deaths"] < arguments.deaths:
                dead = workers.pop(chosen.randrange(len(workers)))
                dead.batched_stream.comm.abort()  # as when its machine is gone
                facts["deaths"] += 1
                workers.append(await start())
            facts["queued"] = max(facts["queued"], len(scheduler.tasks))
        facts["cluster_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        pipe.send(facts)
        os._exit(0)  # the workers' threads


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("workers", 1000), ("items", 20_000), ("seconds", 5.0), ("deaths", 200), ("seed", 1)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    arguments = parser.parse_args()
    dask.config.set(SETTINGS)
    pipe, other = Pipe()
    began = time.perf_counter()
    Process(target=run_process, args=(arguments, other), daemon=True).start()
    address = pipe.recv()
    print(f"{arguments.workers} workers after {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    chosen = random.Random(arguments.seed)
    items = [(number, arguments.seconds * chosen.uniform(0.5, 1.5)) for number in range(arguments.items)]
    began, results = time.perf_counter(), {}
    with DaskWorkers((dict,), address=address) as workers:
        for index, number in workers.map(sleep, items):
            assert index not in results
            results[index] = number
        took = time.perf_counter() - began
    assert [results[index] for index in range(len(items))] == list(range(len(items)))
    pipe.send("done")
    facts = pipe.recv()
    ideal = sum(seconds for _, seconds in items) / arguments.workers
    report = {**vars(arguments), **facts, "took_s": took, "ideal_s": ideal, "items_per_s": len(items) / took}
    report["efficiency"] = ideal / took
    report["client_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in report.items()}))


if __name__ == "__main__":
    main()
