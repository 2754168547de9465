"""load(share=True): one model for all who ask for the same files computed in the same way."""

import gc
import os
import threading
import weakref

import pytest
from helpers import BITNET, write_checkpoint

import bitnet_ref
from bitnet_ref.system.sharing import model_files


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "hf", BITNET)


def load(folder, **options):
    return bitnet_ref.load(folder, **{"backend": "numpy", "threads": 1, "share": True, **options})


def test_the_same_is_shared_and_another_is_not(folder):
    first = load(folder)
    assert load(folder) is first
    assert load(str(folder)) is first
    assert load(folder, share=False) is not first
    assert load(folder, dtype="float64") is not first
    assert load(folder, threads=2) is not first


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_file_is_loaded_again(folder, name):
    first = load(folder)
    os.utime(folder / name, (1, 1))
    second = load(folder)
    assert second is not first
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    (folder / name).write_bytes(data)
    assert load(folder) not in (first, second)


def test_nothing_is_kept_alive(folder):
    model = load(folder)
    seen = weakref.ref(model.weights.embedding.array)
    del model
    gc.collect()
    assert seen() is None


def test_threads_load_once(folder):
    counts, models = [], []
    start = threading.Barrier(6)

    def work():
        start.wait()
        models.append(load(folder, progress=lambda done, total: counts.append(done)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(model) for model in models}) == 1
    assert counts.count(1) == 1


def test_a_failed_load_is_not_remembered(folder):
    good = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(good[:-1])
    with pytest.raises(bitnet_ref.errors.FormatError):
        load(folder)
    (folder / "model.safetensors").write_bytes(good)
    assert load(folder) is load(folder)


def test_a_model_that_is_gone_has_no_files(tmp_path):
    (tmp_path / "of another").write_text("x")
    assert model_files(tmp_path / "gone") == []
