"""How `DaskWorkers` behaves with a thousand workers that die: Dask's real scheduler and client in a process each, and
real workers in a few more processes, whose items only sleep. docs/scale.md has the figures.

    python scripts/simulate_workers.py --workers 1000 --processes 8 --items 5000 --seconds 20 --deaths 50 --kills 1
"""

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import tempfile
import threading
import time
from multiprocessing import Pipe, Process

import dask

from bitnet_ref.system.workers import DaskWorkers

# What a worker does all the time would fill two cores when a thousand of them share those. The scheduler and the client
# have Dask's own settings, but for the patience that workers so slow need.
OF_WORKERS = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "5s",  # a watch of the event loop: 50 times a second by default
    "distributed.admin.tick.limit": "60s",
    "distributed.admin.system-monitor.interval": "600s",
    "distributed.worker.use-file-locking": False,  # of their folders: a queue of a thousand at the start
}
PATIENT = {
    "logging": {"distributed": "critical"},
    "distributed.comm.timeouts.tcp": "300s",
    "distributed.scheduler.worker-ttl": "300s",
}
STARTED_TOGETHER = 25


def sleep(_, item):
    number, seconds = item
    time.sleep(seconds)
    return number


def run_scheduler(pipe):
    async def run():
        from distributed import Scheduler

        async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            pipe.send(scheduler.address)
            most = 0
            while not pipe.poll():
                await asyncio.sleep(0.5)
                most = max(most, len(scheduler.tasks))
            usage = resource.getrusage(resource.RUSAGE_SELF)
            cpu_s, rss_mb = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
            pipe.send({"queued": most, "scheduler_cpu_s": cpu_s, "scheduler_rss_mb": rss_mb})
            os._exit(0)

    dask.config.set(PATIENT)
    asyncio.run(run())


def run_workers(address, count, folder, pipe):
    """`count` workers. For each "die" from the pipe one loses its connection, as when its machine is gone, and another
    one joins."""

    async def run():
        from distributed import Worker

        async def start():
            return await Worker(address, nthreads=1, memory_limit=0, dashboard=False, local_directory=folder)

        workers = []
        while len(workers) < count:
            workers += await asyncio.gather(*(start() for _ in range(min(STARTED_TOGETHER, count - len(workers)))))
        pipe.send("ready")
        while True:
            while not pipe.poll():
                await asyncio.sleep(0.2)
            pipe.recv()
            workers.pop(0).batched_stream.comm.abort()
            workers.append(await start())

    dask.config.set({**PATIENT, **OF_WORKERS})
    asyncio.run(run())


def start(function, *arguments):
    pipe, other = Pipe()
    process = Process(target=function, args=(*arguments, other), daemon=True)
    process.start()
    return process, pipe


def count_stops(stopped, over):
    """Add up the seconds in which this process did not run at all, though it wanted to."""
    while not over.is_set():
        began = time.perf_counter()
        time.sleep(0.1)
        if (late := time.perf_counter() - began - 0.1) > 1:
            stopped.append(late)


class Machines:
    """The processes of workers, and what happens to them in the run."""

    def __init__(self, address, folder, arguments):
        self.arguments, self.deaths, self.kills = arguments, 0, 0
        self.group = run_workers, address, arguments.workers // arguments.processes, folder
        self.groups = [start(*self.group) for _ in range(arguments.processes)]
        for _, pipe in self.groups:
            pipe.recv()

    def trouble(self, expected_s, over):
        """At equal distances in the time that the run should take: single workers die, whole processes are killed."""
        arguments, chosen = self.arguments, random.Random(self.arguments.seed)
        events = ["death"] * arguments.deaths + ["kill"] * arguments.kills
        chosen.shuffle(events)
        for event in events:
            if over.wait(expected_s / (len(events) + 1)):
                return
            number = chosen.randrange(len(self.groups))
            process, pipe = self.groups[number]
            if event == "kill":
                process.kill()
                process.join()
                self.groups[number] = start(*self.group)
                self.kills += self.group[2]
            else:
                pipe.send("die")
                self.deaths += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("workers", 1000), ("processes", 8), ("items", 5000), ("seconds", 20.0), ("deaths", 50)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--kills", type=int, default=1, help="processes killed with all their workers")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dask.config.set(PATIENT)
    began = time.perf_counter()
    _, to_scheduler = start(run_scheduler)
    folder = tempfile.TemporaryDirectory(prefix="simulated-workers-")
    machines = Machines(address := to_scheduler.recv(), folder.name, arguments)
    start_s = time.perf_counter() - began
    print(f"{arguments.workers} workers after {start_s:.1f} s", file=sys.stderr, flush=True)
    chosen = random.Random(arguments.seed)
    items = [(number, arguments.seconds * chosen.uniform(0.5, 1.5)) for number in range(arguments.items)]
    ideal, over, results, first_s = sum(s for _, s in items) / arguments.workers, threading.Event(), {}, None
    threading.Thread(target=machines.trouble, args=(ideal, over), daemon=True).start()
    threading.Thread(target=count_stops, args=(stopped := [], over), daemon=True).start()
    began = time.perf_counter()
    with DaskWorkers((dict,), address=address) as workers:
        for index, number in workers.map(sleep, items):
            assert index not in results
            results[index] = number
            first_s = first_s or time.perf_counter() - began
            if len(results) % 500 == 0:
                print(f"{len(results)} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    took = time.perf_counter() - began
    over.set()
    assert [results[index] for index in range(len(items))] == list(range(len(items)))
    to_scheduler.send("done")
    report = {**vars(arguments), "start_s": start_s, "deaths": machines.deaths, "killed": machines.kills}
    report |= {**to_scheduler.recv(), "first_s": first_s, "took_s": took, "ideal_s": ideal, "stopped_s": sum(stopped)}
    report["client_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in report.items()}))


if __name__ == "__main__":
    main()
