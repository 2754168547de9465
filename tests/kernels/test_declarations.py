"""What _cpu.pyx declares of structs and function types in the C headers is as the headers have it.

The compiler would not notice: Cython converts to the type that it was told, and C from that one in silence."""

import re
from pathlib import Path

import pytest

import bitnet_ref

KERNELS = Path(bitnet_ref.__file__).parent / "kernels" / "cpu"
SAME = {"Py_ssize_t": "ptrdiff_t", "bint": "int"}
FUNCTION = r"([^;(){}\n]+)\(\*(\w+)\)\(([^;]*?)\)"  # type, name, parameters


def read(suffix, comments):
    text = "\n".join(path.read_text() for path in sorted(KERNELS.glob(f"*{suffix}")))
    return re.sub(comments, " ", text, flags=re.S)


HEADERS = read(".h", r"/\*.*?\*/|//[^\n]*")
for macro in re.finditer(r"#define (TERNARY_ARGS) ((?:[^\n]*\\\n)*[^\n]*)", HEADERS):
    HEADERS = HEADERS.replace(f"({macro[1]},", f"({macro[2]},").replace("\\\n", " ")
CYTHON = read(".pyx", r"#[^\n]*| noexcept| nogil")


def split(text, separator=","):
    """The parts between separators that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def type_of(text):
    """The type of a parameter or member without its name: "const float *x" and "const float *" are one."""
    if match := re.fullmatch(r"(.*?)\(\*\s*\w*\)\s*\((.*)\)", text.strip(), re.S):
        return f"{type_of(match[1])}(*)({', '.join(type_of(each) for each in split(match[2]))})"
    words = re.findall(r"\w+|\*", text)
    kind = next(i for i, word in enumerate(words) if word not in ("const", "static"))
    name = " ".join(SAME.get(word, word) for i, word in enumerate(words) if i <= kind or word == "*")
    return type_of(FUNCTIONS[name]) if name in FUNCTIONS else name


def members(declarations):
    """{name: type} of the members of a struct."""
    found = {}
    for declaration in declarations:
        if match := re.match(r"[^(]*\(\*(\w+)\)", declaration):
            found[match[1]] = type_of(declaration)
            continue
        kind, declarators = re.match(r"((?:const )?\w+)(.*)", re.sub(r"\[\w+\]", "", declaration), re.S).groups()
        for declarator in split(declarators):
            found[re.findall(r"\w+", declarator)[-1]] = type_of(f"{kind} {declarator}")
    return found


FUNCTIONS = {name: f"{kind}(*)({params})" for kind, name, params in re.findall(rf"typedef {FUNCTION}\s*;", HEADERS)}
STRUCTS = {
    name: members(split(body, ";")) for body, name in re.findall(r"typedef struct[\w\s]*\{([^{}]*)\}\s*(\w+);", HEADERS)
}
DECLARED = {
    name: members(line.strip() for line in re.sub(r",\s*\n\s*", ", ", body).splitlines() if line.strip())
    for name, body in re.findall(r"    ctypedef struct (\w+):\n((?: {8}.*\n)+)", CYTHON)
}
TYPES = {name: f"{kind}(*)({params})" for kind, name, params in re.findall(rf"ctypedef {FUNCTION} *\n", CYTHON)}


@pytest.mark.parametrize("name", DECLARED)
def test_members_are_declared_as_the_headers_have_them(name):
    assert {member: STRUCTS[name].get(member) for member in DECLARED[name]} == DECLARED[name]


@pytest.mark.parametrize("name", TYPES)
def test_a_function_type_is_declared_as_the_headers_have_it(name):
    assert name not in FUNCTIONS or type_of(TYPES[name]) == type_of(FUNCTIONS[name])


def test_every_kernel_of_a_set_is_declared():
    assert DECLARED["kernel_set"] == STRUCTS["kernel_set"]
    assert len(DECLARED["kernel_set"]) > 30


def test_the_comparison_sees_differences():
    assert type_of("void (*)(const float *x, size_t n)") == type_of("void (*f)(const float *, size_t)")
    for other in ("void (*)(float *, size_t)", "void (*)(const float *, int)", "int (*)(const float *, size_t)"):
        assert type_of("void (*)(const float *, size_t)") != type_of(other)
    assert members(["int a, *b"]) == {"a": "int", "b": "int *"}
    assert {"attend_fn", "strip_rows_fn"} <= set(TYPES)
