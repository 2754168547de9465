"""Builds one layer of PyTorch or NumPy, sets its weights, and runs it on given inputs, forward and backward.

    echo '[{"target": "package.module:Class", "args": "", "given": NPZ, "out": NPZ}]' | python record_linear.py

given: "calls", JSON, a list of {"bias": bool, "eval": bool, "dtype": NAME, "storage": bool}, and for call i the arrays
"i/x" (B, T, K), "i/w" (N, K), perhaps "i/bias" (N,) and "i/dy" (B, T, N).   out: "i/y", "i/dx", "i/dw", "i/db", or
"i/failed", a text; "i/NAME" of a call with "storage" is y after that method of the layer, or after eval() and train().
A layer of NumPy is called as layer(x), and has backward(dy) -> dX, dW or dX, dW, dbias if it has gradients.
"""

import ast
import contextlib
import importlib
import importlib.machinery
import inspect
import json
import os
import re
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np

WEIGHTS = ("weight", "weights", "w", "W", "kernel")
STORES = re.compile(r"bake|pack|quanti[sz]e_?(weights?|model|self)?$|ternari[sz]e|freeze|fuse|deploy", re.I)


def find(target):
    """ "package.module:Class", "file.py:Class" -> the class, or a function that returns a layer"""
    module, _, path = target.partition(":")
    if module.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(module)))
        layer = importlib.machinery.SourceFileLoader("layer_under_test", module).load_module()
    else:
        layer = importlib.import_module(module)
    for name in path.split("."):
        layer = getattr(layer, name)
    return layer


def written_arguments(text, sizes):
    """ "in_features, out_features, eps=1e-6" -> positional and named arguments; nothing in it is executed"""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)

    def value(node):
        return sizes[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    return [value(each) for each in call.args], {each.arg: value(each.value) for each in call.keywords}


def build(make, args, k, n, bias):
    """The layer, by the first of the usual signatures that it takes."""
    sizes = {"in_features": k, "out_features": n, "bias": bias}
    if args:
        positional, named = written_arguments(args, sizes)
        return make(*positional, **named)
    problems = []
    shapes = [(k, n)]
    with contextlib.suppress(TypeError, ValueError):
        first, second = list(inspect.signature(make).parameters)[:2]
        shapes = [(n, k)] if "out" in first and "in" in second else shapes
    tries = [(each, {"bias": bias}) for each in shapes] + [((), sizes)]
    tries += [(each, {"use_bias": bias}) for each in shapes]
    tries += [] if bias else [(each, {}) for each in shapes]
    for positional, named in tries:
        try:
            return make(*positional, **named)
        except TypeError as problem:
            problems.append(str(problem))
    raise TypeError(f"no usual signature fits ({problems[0]}); name the arguments with --args")


class Layer:
    """A layer with its weight, its bias and the norms inside it."""

    def __init__(self, layer, k, n):
        self.layer, self.shape = layer, (n, k)
        self.is_torch = hasattr(layer, "named_parameters")
        if self.is_torch:
            layer.float()
            layer.train()
            arrays = dict(layer.named_parameters())
            floats = {name: b for name, b in layer.named_buffers() if b.is_floating_point()}
            arrays |= {name: buffer for name, buffer in floats.items() if tuple(buffer.shape) in ((n, k), (k, n))}
        else:
            arrays = {name: value for name, value in vars(layer).items() if isinstance(value, np.ndarray)}
        self.arrays = arrays
        matrices = [name for name, a in arrays.items() if tuple(a.shape) in ((n, k), (k, n))]
        matrices.sort(key=lambda name: name.rpartition(".")[2] not in WEIGHTS)
        if not matrices:
            shapes = {name: list(a.shape) for name, a in arrays.items()}
            raise TypeError(f"it has no weight of {n} x {k} floats, but {shapes}")
        self.weight = matrices[0]
        biases = [name for name, a in arrays.items() if tuple(a.shape) == (n,) and name.split(".")[-1] in ("bias", "b")]
        self.bias = biases[0] if biases else None
        for name, a in arrays.items():  # the norms' weights and biases
            if tuple(a.shape) == (k,) and name != self.bias:
                self.put(name, np.zeros(k) if "bias" in name or "beta" in name else np.ones(k))

    def put(self, name, value):
        old = self.arrays[name]
        if self.is_torch:
            import torch

            old.data.copy_(torch.as_tensor(np.array(value), dtype=old.dtype))
        else:
            old[...] = value

    def set(self, w, bias):
        turned = tuple(self.arrays[self.weight].shape) != self.shape
        self.put(self.weight, w.T if turned else w)
        if self.bias is not None:
            self.put(self.bias, np.zeros(self.shape[0]) if bias is None else bias)
        return turned

    def forward(self, x):
        try:
            return self.layer(x)
        except Exception as problem:
            try:
                y = self.layer(x.reshape(-1, x.shape[-1]))
            except Exception:
                raise problem from None
            return y.reshape(*x.shape[:2], -1)

    def run(self, x, dy, dtype):
        """-> name -> array: y, and the gradients if `dy` is given"""
        if not self.is_torch:
            out = {"y": self.forward(x.astype(np.float32 if dtype == "bfloat16" else dtype))}
            if dy is not None and hasattr(self.layer, "backward"):
                out |= zip(("dx", "dw", "db"), self.layer.backward(dy), strict=False)
            return out
        import torch

        self.layer.zero_grad()
        x = torch.tensor(x, dtype=getattr(torch, dtype), requires_grad=dy is not None)
        with torch.set_grad_enabled(dy is not None):
            y = self.forward(x)
        out = {"y": y.detach()}
        if dy is not None and y.requires_grad:
            try:
                y.backward(torch.tensor(dy).reshape(y.shape).to(y.dtype))
            except Exception as problem:
                return {"y": out["y"].float().numpy(), "no_backward": np.array(f"{type(problem).__name__}: {problem}")}
            out |= {"dx": x.grad, "dw": getattr(self.arrays[self.weight], "grad", None)}
            out |= {"db": self.arrays[self.bias].grad} if self.bias else {}
        return {name: a.float().numpy() for name, a in out.items() if a is not None}

    def storing_methods(self):
        """Methods of the layer's own class that need no argument and are called as if they store its weights."""
        for name in dir(type(self.layer)):
            own = any(
                name in vars(each) for each in type(self.layer).__mro__ if not each.__module__.startswith("torch.")
            )
            method = getattr(self.layer, name) if own and not name.startswith("__") and STORES.search(name) else None
            if callable(method):
                needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
                if not [p for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]:
                    yield name


def store(make, arrays):
    """y after each way of storing the weights, once and twice: on a layer of its own each time"""
    own = make()
    runs = {}
    ways = list(own.storing_methods())
    if own.is_torch:
        ways.append("eval() and train()")
    for way in ways:
        fresh = make()
        fresh.set(arrays["w"], None)
        ys = []
        try:
            for _ in range(2):
                if way == "eval() and train()":
                    fresh.layer.eval()
                    fresh.layer.train()
                else:
                    returned = getattr(fresh.layer, way)()
                    if returned is not None and not isinstance(returned, type(fresh.layer)):
                        break  # it returns what it computed, and changes nothing
                if fresh.is_torch:
                    fresh.layer.float()
                ys.append(fresh.run(arrays["x"], None, "float32")["y"])
        except Exception as problem:
            runs[way] = np.array(f"{type(problem).__name__}: {problem}")
            continue
        if ys:
            runs[way] = np.stack(ys)
    return runs


def run_call(make, built, call, arrays):
    n, k = arrays["w"].shape

    def fresh():
        return Layer(make(k, n, call["bias"]), k, n)

    if call.get("storage"):
        return store(fresh, arrays)
    key = k, n, call["bias"]
    if key not in built:
        built[key] = fresh()
    layer = built[key]
    if call["dtype"] != "float32" or call["eval"]:
        layer = fresh()  # what changes a layer for good must not change the other calls
    turned = layer.set(arrays["w"], arrays.get("bias"))
    if layer.is_torch and call["eval"]:
        layer.layer.eval()
    if layer.is_torch and call["dtype"] != "float32":
        import torch

        layer.layer.to(getattr(torch, call["dtype"]))
    out = layer.run(arrays["x"], arrays.get("dy"), call["dtype"])
    if turned and "dw" in out:
        out["dw"] = out["dw"].T
    if call["bias"] and layer.bias is None:
        out["no_bias"] = np.array("the layer has no bias")
    return out


def run(job):
    with np.load(job["given"]) as archive:
        given = {name: archive[name] for name in archive.files}
    target = find(job["target"])
    built: dict = {}
    out: dict = {}

    def make(k, n, bias):
        return build(target, job["args"], k, n, bias)

    for i, call in enumerate(json.loads(str(given["calls"]))):
        arrays = {name.split("/")[1]: a for name, a in given.items() if name.startswith(f"{i}/")}
        try:
            results = run_call(make, built, call, arrays)
        except Exception as problem:
            results = {"failed": np.array(f"{type(problem).__name__}: {problem}")}
        out |= {f"{i}/{name}": a for name, a in results.items()}
    package = job["target"].partition(":")[0].partition(".")[0]
    versions = []
    with contextlib.suppress(Exception):
        from importlib.metadata import packages_distributions, version

        versions = [f"{name} {version(name)}" for name in packages_distributions().get(package, [])]
    np.savez(job["out"], versions=np.array(", ".join(versions)), **out)


if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr  # some packages print when they are imported
    for each in json.load(sys.stdin):
        failed = None
        try:
            run(each)
        except (Exception, SystemExit) as problem:
            failed = f"{type(problem).__name__}: {problem}"
        print(json.dumps({"failed": failed, "unavailable": None}), file=stdout, flush=True)
