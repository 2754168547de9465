"""Runs of the shell interface: in this process, or in one of its own."""

import json
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

import bitnet_ref
from bitnet_ref.cli import cli

PROMPT = "Once upon a time"
needs_cython = pytest.mark.skipif(bitnet_ref.available_backends()["cython"] is not None, reason="no extension here")
BACKEND = "numpy" if bitnet_ref.available_backends()["cython"] else "cython"
FAST = ("--backend", BACKEND, "--threads", "1")  # one thread: the suite may share its cores
PLAIN = (*FAST, "--generation-defaults", "plain")  # greedy, whatever the model recommends
SLOW = ("--backend", "numpy", "--threads", "1")  # for what is to be interrupted
# A task of lm-eval; DATA is a file of JSON lines
CHOICE = """task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def invoke(*args, stdin=None):
    return CliRunner().invoke(cli, list(map(str, args)), input=stdin)


def invoke_json(*args, stdin=None, code=0):
    result = invoke(*args, "--json", stdin=stdin)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def process(*args, module="bitnet_ref.cli", **options):
    """The command in a process of its own, which obeys SIGINT even where the test runner was told to ignore it."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, args)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )
