"""A child process that was forked at a bad moment uses what its parent's threads were in the middle of."""

import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

import bitnet_ref
from bitnet_ref.system import forks
from bitnet_ref.system.forks import ForkLock, other_thread_imports
from bitnet_ref.system.lazy import lazy_property

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks there")
SECONDS = 20


def works_in_a_child(function):
    """Whether the function returns in a forked process."""
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(SECONDS)  # ends it
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def beside(work, started, end, function):
    """The function's result, while another thread is in the middle of its work."""
    thread = threading.Thread(target=work)
    thread.start()
    started.wait(SECONDS)
    try:
        return function()
    finally:
        end.set()
        thread.join()


class Holder:
    def __init__(self):
        self.started, self.end, self.times = threading.Event(), threading.Event(), 0

    @lazy_property
    def value(self):
        """What it is."""
        self.times += 1
        if threading.current_thread() is not threading.main_thread():
            self.started.set()
            self.end.wait(SECONDS)
        return object()


def test_a_property_that_another_thread_computes():
    holder = Holder()
    assert beside(lambda: holder.value, holder.started, holder.end, lambda: works_in_a_child(lambda: holder.value))
    assert holder.value is holder.value
    assert holder.times == 1
    assert Holder.value.__doc__ == "What it is."


def test_a_lock_that_another_thread_holds():
    lock, started, end = ForkLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            started.set()
            end.wait(SECONDS)

    def use():
        assert lock.acquire(blocking=False)
        lock.release()

    assert beside(hold, started, end, lambda: works_in_a_child(use))
    with lock:
        assert not lock.acquire(blocking=False)
        assert works_in_a_child(lambda: lock.acquire(blocking=False))


def test_a_fork_waits_for_the_imports_of_other_threads(tmp_path, monkeypatch):
    name = "module_that_takes_its_time"
    (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(0.5)\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=__import__, args=(name,))
    thread.start()
    while not other_thread_imports():
        time.sleep(0.001)
    try:
        assert works_in_a_child(lambda: __import__(name).value)
        assert not other_thread_imports()
    finally:
        thread.join()
        sys.modules.pop(name, None)


def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(forks, "other_thread_imports", lambda: True)
    monkeypatch.setattr(forks, "WAIT_S", 0.05)
    assert works_in_a_child(lambda: None)


def test_no_property_of_the_package_holds_a_lock_while_it_is_computed():
    folder = Path(bitnet_ref.__file__).parent
    for path in folder.rglob("*.py"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "import" in line]
        assert not any("cached_property" in line for line in lines), path


def test_no_module_of_the_package_has_a_lock_that_a_child_would_get_held():
    """Those of objects are made anew with them. The emulated device, which is for tests, does not fork."""
    for path in Path(bitnet_ref.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        plain = re.findall(r"^\w+ = (?:threading\.)?(?:R?Lock|Condition|Semaphore)\(.*", text, re.MULTILINE)
        assert plain == [] or "emulation" in path.parts, path
