"""Writes a trace file with NumPy alone, for the other scripts of this folder. crossval/README.md has the format."""

import json
import sys
from fnmatch import fnmatchcase

import numpy as np

_DTYPES = {"float32": "F32", "int8": "I8", "int32": "I32"}


class Unavailable(Exception):
    """The engine has nothing for this model."""


def run(record):
    """Read a list of jobs, as JSON, from the standard input, record each, and print a line of JSON for each.

    record: job -> (name -> array, engine, engine_dtype).   The line: {"failed": null, "unavailable": null}, or the
    reason in one of them.
    """
    for job in json.load(sys.stdin):
        failed = unavailable = None
        try:
            tensors, engine, dtype = record(job)
            tensors = {name: array for name, array in tensors.items() if wants(job, name)}
            write(job["out"], tensors, job["tokens"], engine, dtype, job.get("calls"), job.get("sequences"))
        except Unavailable as problem:
            unavailable = str(problem)
        except (Exception, SystemExit) as problem:  # the next job may succeed
            failed = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"failed": failed, "unavailable": unavailable}), flush=True)


def wants(job, name):
    """Whether the job asks for the tensor: its "names" are globs; without them, for all."""
    return any(fnmatchcase(name, glob) for glob in job.get("names", "*"))


def parts(job):
    """The tokens of each sequence of a job."""
    tokens, lists = list(job["tokens"]), []
    for length in job.get("sequences") or [len(tokens)]:
        lists.append(tokens[:length])
        tokens = tokens[length:]
    return lists


def write(path, tensors, token_ids, engine, engine_dtype="float32", calls=None, sequences=None):
    """tensors: name -> float32, int8 or int32 array"""
    strings = {"format": "bitnet_ref.trace", "version": "1", "engine": engine, "engine_dtype": engine_dtype}
    strings |= {"calls": json.dumps(calls)} if calls else {}
    strings |= {"sequences": json.dumps(sequences)} if sequences else {}
    header, end = {"__metadata__": {**strings, "token_ids": json.dumps([int(i) for i in token_ids])}}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        entry = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 64) * 64)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            little = array.dtype.newbyteorder("<")
            file.write(np.ascontiguousarray(array, dtype=little).tobytes())
