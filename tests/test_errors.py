"""bitnet_ref.errors: one family, whose members carry as attributes what their message says."""

import inspect
import pickle
from pathlib import Path

import pytest

from bitnet_ref import errors


def test_one_family():
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]
    assert {cls.__name__ for cls in found if not cls.__name__.startswith("_")} == set(errors.__all__)
    assert [cls for cls in found if not issubclass(cls, errors.BitNetRefError)] == [errors.ConfigWarning]
    for name in ("BackendUnavailable", "DeviceError", "OutOfMemory"):
        assert issubclass(getattr(errors, name), errors.BackendError)


@pytest.mark.parametrize("cls", [errors.FormatError, errors.ConfigError, errors.TokenizerError])
def test_file_errors_say_where(cls):
    error = cls("is bad", path=Path("a/b.bin"), offset=12, field="x.shape")
    assert str(error) == "a/b.bin, byte 12, x.shape: is bad"
    assert (error.path, error.offset, error.field, error.message) == ("a/b.bin", 12, "x.shape", "is bad")
    assert str(cls("is bad")) == "is bad"
    assert str(cls("is bad", offset=0)) == "byte 0: is bad"
    assert cls("is bad").path is None


@pytest.mark.parametrize("cls", [errors.GenerationError, errors.BackendUnavailable, errors.ConfigError])
def test_errors_name_the_option_at_fault(cls):
    error = cls("is more than top_k", field="top_p", mentions=["top_k"])
    assert str(error) == "top_p: is more than top_k"
    assert (error.message, error.field, error.mentions) == ("is more than top_k", "top_p", ("top_k",))
    assert (str(cls("no")), cls("no").field, cls("no").mentions) == ("no", None, ())


def test_shape_and_numerics_errors():
    error = errors.ShapeError("op", expected="(N, 3)", got="(2, 4)")
    assert str(error) == "op: expected (N, 3), got (2, 4)"
    assert (error.op, error.expected, error.got) == ("op", "(N, 3)", "(2, 4)")
    assert errors.NumericsError("bad", tensor="blocks.0").tensor == "blocks.0"
    assert errors.NumericsError("bad").tensor is None


@pytest.mark.parametrize(
    "error",
    [
        errors.FormatError("is bad", path="a", offset=1, field="f"),
        errors.ShapeError("op", expected="a", got="b"),
        errors.NumericsError("bad", tensor="t"),
        errors.GenerationError("no", field="top_p", mentions=["top_k"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_process_boundaries(error):
    """A worker process sends its exception back pickled."""
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_a_message_about_a_file_is_short_whatever_the_file_holds():
    error = errors.ConfigError(f"expected a number, got {'x' * 10**6}; correct it", path="a", field="k" * 10**6)
    assert len(str(error)) < 1300
    assert "expected a number, got xxx" in str(error)
    assert str(error).endswith("; correct it")
