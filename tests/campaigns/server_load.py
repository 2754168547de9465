"""A locustfile: each of its users sends a number of requests in turn, reads the streams and compares the texts.

CASES: a JSON file with a list of [body of a completion, its text]. REQUESTS: of each user. OUT: the file of results:
how many were right, what was wrong, and the seconds to each first chunk and to each end.
"""

import json
import os
import time
from pathlib import Path

from locust import FastHttpUser, constant, events, task
from locust.exception import StopUser

CASES = json.loads(Path(os.environ["CASES"]).read_text())
REQUESTS, USERS = int(os.environ["REQUESTS"]), int(os.environ["USERS"])
results = {"right": 0, "wrong": [], "first_s": [], "whole_s": []}
numbers = iter(range(USERS))
ended = []


class Reader(FastHttpUser):
    wait_time = constant(0)
    network_timeout = 120.0

    def on_start(self):
        self.number, self.sent = next(numbers), 0

    @task
    def read(self):
        if self.sent == REQUESTS:
            ended.append(self.number)
            if len(ended) == USERS:
                self.environment.runner.quit()
            raise StopUser
        body, expected = CASES[(self.number * 7 + self.sent) % len(CASES)]
        self.sent += 1
        text, started, first_s = "", time.perf_counter(), None
        with self.client.post(
            "/v1/completions", json={**body, "stream": True}, stream=True, catch_response=True
        ) as reply:
            while line := reply.stream.readline(b"\n\n"):
                if line.startswith(b"data: {"):
                    first_s = first_s or time.perf_counter() - started
                    text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))
            if text == expected:
                results["right"] += 1
                reply.success()
            else:
                results["wrong"].append([self.number, self.sent, reply.status_code, text, expected])
                reply.failure("another text than alone")
        results["first_s"].append(first_s)
        results["whole_s"].append(time.perf_counter() - started)


@events.quitting.add_listener
def write(**_):
    Path(os.environ["OUT"]).write_text(json.dumps(results))
