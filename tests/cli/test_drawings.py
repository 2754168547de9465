"""What commands draw of given results, with its styles, as it was recorded.

When a change is meant, running this file records it.
"""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import BITNET, DATA, GOLDEN
from rich.console import Console
from rich.segment import Segment

from bitnet_ref.benchmark.kernels import KernelBench, KernelResult
from bitnet_ref.benchmark.models import ModelBench, RuleBench, StepBytes
from bitnet_ref.benchmark.serve import Load, LoadPoint, Quantiles, ServeBench
from bitnet_ref.benchmark.timing import Conditions, Timing
from bitnet_ref.benchmark.validate import Check
from bitnet_ref.cli import (
    bench_command,
    bench_model,
    convert_command,
    crossval_command,
    crossval_outputs,
    doctor_command,
    evaluation_commands,
    grade_command,
    inspect_command,
    models_commands,
    verify_command,
)
from bitnet_ref.cli.bench_shared import Subject
from bitnet_ref.cli.shell import make_row, make_table, style_text
from bitnet_ref.crossval.compare import Comparison, OpResult
from bitnet_ref.crossval.doctor import BackendState, Installation
from bitnet_ref.crossval.exercises.grading import Grade, Graded
from bitnet_ref.crossval.explain.diagnose import Diagnoses, Diagnosis
from bitnet_ref.crossval.linear.verdict import LinearVerdict, LineVerdict
from bitnet_ref.crossval.paths import PathCheck
from bitnet_ref.crossval.precision import PrecisionBench, PrecisionError
from bitnet_ref.crossval.receipt import Verification
from bitnet_ref.crossval.report import Crossing
from bitnet_ref.evaluation import Perplexity
from bitnet_ref.formats.convert.proof import Proof, Tally
from bitnet_ref.inspection import inspect_model
from bitnet_ref.inspection.facts import Finding, Inspection
from bitnet_ref.serving import EngineConfig
from bitnet_ref.serving.http.first_token import FirstToken, OneToken
from bitnet_ref.serving.http.verify import AnswerCheck, Difference

RECORDED = DATA / "cli" / "drawn.json"
MB = 1 << 20


def drawn(draw, width=100, encoding="utf-8"):
    """Lines of text, where [style|text] has a style."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    out = Console(
        file=stream, width=width, force_terminal=True, color_system="standard", no_color=False, highlight=False
    )
    shown = []
    out.print = lambda *objects, **options: shown.extend(rendered(out, objects, **options))
    draw(out)
    return "".join(shown).splitlines()


def rendered(out, objects, style=None, **options):
    for each in objects or ("",):
        segments = out.render(out.render_str(each, highlight=False, markup=False) if isinstance(each, str) else each)
        for text, of_text, _ in Segment.simplify(segments):
            for number, line in enumerate(text.split("\n")):
                of_line = " ".join(filter(None, (str(style or ""), "" if of_text is None else str(of_text))))
                yield "\n" * (number > 0)
                yield f"[{of_line}|{line}]" if of_line not in ("", "none") and line.strip() else line
    yield "" if text.endswith("\n") else "\n"


# -- doctor ------------------------------------------------------------------------------------------------------------

WHOLE = Installation(
    versions={"bitnet_ref": "1.2", "numpy": "2.4.6", "rich": "15", "cupy": None, "matplotlib": None},
    blas="OpenBLAS 0.3",
    os="Linux 6",
    python="3.11.7",
    cpu="EPYC",
    cpu_features={"avx2": True, "avx512f": True, "amx": False, "neon": False},
    cores=8,
    threads=4,
    threads_from="OMP_NUM_THREADS",
    memory_total=64 << 30,
    memory_available=3 << 29,
    extension={"built": True, "openmp": True, "why": None},
    backends=[BackendState("numpy", True, None, "BLAS"), BackendState("cupy", False, "no card", None)],
    methods=[
        {"name": "2-bit", "chosen": True, "reason": None, "summary": "two bits", "why": "the fastest"},
        {"name": "table", "chosen": False, "reason": None, "summary": "sums in a table", "why": "slower"},
        {"name": "amx", "chosen": False, "reason": "no tiles", "summary": "tiles", "why": "-"},
    ],
    models=["storychat", "storyteller"],
)
BARE = replace(
    WHOLE,
    versions={"bitnet_ref": "1.2", "numpy": "2.4.6"},
    cpu_features={"neon": True},
    threads=None,
    threads_from="OMP_NUM_THREADS=0 is no number of threads",
    memory_total=None,
    memory_available=None,
    extension={"built": False, "openmp": False, "why": "no compiler"},
    methods=[],
)

# -- bench -------------------------------------------------------------------------------------------------------------

QUIET = Conditions(wall_s=9.0, processor_s=8.0, processors=8, others=0.1, waited=0.0, why_no_energy="")
BUSY = replace(QUIET, others=3.25, waited=0.4, why_no_energy="no counters")
EQUAL = Check(accumulators=700, floats=700, logits_error=1e-6, logits_allowed=1e-4)
TIMING = Timing(best_s=0.002, median_s=0.0025, repetitions=7, processor_s=0.0021)
KERNEL = KernelResult("cython", "avx2", "2-bit", 70, 64, 4, 1500, EQUAL, TIMING, Timing(0.001, 0.0012, 7), 4 * MB)
KERNELS = KernelBench(
    threads=1,
    read_how="AVX2",
    read_gb_per_s=12.34,
    last_level_cache_bytes=MB,
    results=[
        KERNEL,
        replace(KERNEL, kernel_set=None, layout=None, backend="numpy", tokens=16, weight_bytes=3000),
        replace(KERNEL, out_features=128, timing=replace(TIMING, best_s=2.5e-5, median_s=1.5, energy_j=0.02)),
    ],
    conditions=BUSY,
)
WRONG = replace(
    KERNELS,
    threads=2,
    read_gb_per_s=None,
    results=[KERNEL, replace(KERNEL, check=replace(EQUAL, unequal_accumulators=3, unequal_floats=5), timing=None)],
    conditions=QUIET,
)
MODEL = ModelBench(
    backend="cython",
    kernel_set="avx512",
    threads=2,
    config=BITNET,
    weight_bytes=100 * MB,
    prompt_tokens=64,
    new_tokens=32,
    check=EQUAL,
    step_bytes=StepBytes(ternary=60 * MB, dense=0, head=30 * MB, cache=MB, other=MB // 2),
    last_level_cache_bytes=MB,
    read_how="AVX-512",
    head="screened",
    read_bytes=256 * MB,
    ternary_multiply_adds=10**9,
    read=Timing(0.02, 0.025, 7),
    peak_multiply_adds=10**10,
    peak=Timing(0.01, 0.012, 7),
    prompt=Timing(0.5, 0.6, 5, 0.9, 3.2),
    decode=Timing(0.011, 0.013, 32, 0.02, 0.7),
    choose=Timing(0.0004, 0.0005, 32),
    skipped={"down_proj": 0.8, "up_proj": 0.25},
    not_multiplied={"down_proj": 0.5},
    strip_bytes=3 * MB,
    head_rows=1234.5,
    peak_memory_bytes=160 * MB,
    conditions=QUIET,
)
PLAIN = replace(
    MODEL,
    kernel_set=None,
    head="exact",
    head_rows=None,
    skipped={},
    not_multiplied={"down_proj": 0.0},
    peak=None,
    peak_multiply_adds=0,
    prompt=Timing(0.5, 0.6, 5),
    decode=Timing(0.011, 0.013, 32),
    last_level_cache_bytes=1000 * MB,
    threads=1,
    conditions=None,
)
RULE = RuleBench(PLAIN, tokens=96, kl_mean=3.2e-4, kl_max=0.0125, same_top=0.97, perplexity=7.3, floats_perplexity=7.25)
UNEQUAL = replace(PLAIN, check=replace(EQUAL, unequal_floats=1234), prompt=None)
STORY = Subject(None, None, None, "auto", "auto", "stored", None, None)
SHORT = Subject(None, "1b", 3, "auto", "auto", "stored", None, None)
WAITS = Quantiles(0.012, 0.02, 0.034)
POINT = LoadPoint(12.5, 40, 4, 10.0, 640, WAITS, Quantiles(0.001, 0.002, 0.0031), 8, 3.25, 5.5, 32.0)
SERVE = ServeBench("cython", 2, True, 8, Load(), EngineConfig(max_batch=32), 25.125, (POINT,), QUIET)
IDLE = replace(POINT, first_token=None, between_tokens=None, refused=0, processor_s=None, energy_j=None)
PROFILE = SimpleNamespace(
    caption="2 steps",
    wall_s=2.0,
    ops=[
        SimpleNamespace(name="linears q_proj", calls=12, total_s=1.25, gb_per_s=3.25),
        SimpleNamespace(name="rope", calls=6, total_s=0.0005, gb_per_s=None),
    ],
)

# -- the others --------------------------------------------------------------------------------------------------------

PROOF = Proof(
    planes=Tally(42, 42),
    scales=Tally(40, 42, 1.25e-4, "q"),
    tensors=Tally(13, 13),
    tokenizer="equal",
    tokens=5,
    logits_equal=False,
    logits_difference=0.00125,
)
OPS = [
    OpResult(
        name=f"blocks.{number}.hook",
        kind="gate",
        shape=(3, 4),
        status=status,
        token=None,
        excess=0.0,
        tolerance=0.0,
        reason="-",
        n_values=12,
        n_differ=number * 1000,
        max_abs=number / 8,
        relative_l2=number / 16,
        cosine=1 - number / 64,
        scale_ratio=1 + number / 32,
        worst=(0, 0),
    )
    for number, status in enumerate(
        ("ok", "ok", "rounding flip", "ok", "ok", "differs", "differs", "ok", "ok", "ok", "ok")
    )
]
RUN = Comparison("free-running", 3, 11, OPS)
CROSSINGS = [
    Crossing("mine", [RUN]),
    Crossing("yours", [Comparison("op by op", 3, 5, OPS[:5])]),
    Crossing("gone", unavailable="it is not installed"),
    Crossing("odd", [replace(RUN, ops=OPS[:5], unknown={"blocks.0.huk": "blocks.0.hook", "x": None})], strict=True),
]
PRECISION = PrecisionBench(
    backend="cupy",
    device="a card",
    tokens=99,
    largest_logit=12.34,
    errors=(PrecisionError("float16", "prompt", 0.0123, 0.001, 1e-5, 2e-4, 0.9875),),
    continued=48,
    same_tokens={"float16": 47},
)
VERIFICATION = Verification("r.json", ["a", "b"], ["the logits", "the hash"], ["llama.cpp is not here"])
CHECKS = [
    PathCheck("replayed, 3 sequences", True, 1234, "equal"),
    PathCheck("a" * 40, False, 0, "at token 3: 1, not 2"),
]
TEXTS = [
    Perplexity("gptq", 2048, 12.34567, 0.12, 2.5, 0.9, None, 3, 6141, 20000, 6141, 2.0, 3070.5, "cython"),
    Perplexity("llama.cpp", 512, 1e9, 0.5, 20.7, 9.9, None, 3, 600, 2000, 900, 2.0, 450.0, "numpy"),
]
TASKS = {
    "results": {
        "tiny": {"alias": "tiny", "acc,none": 0.5, "acc_stderr,none": 0.25, "f1,strict": 1},
        "other": {"em,none": 0.125, "em_stderr,none": "N/A", "sample_len": 3},
    }
}
FACTS = {
    "kind": "hf-packed",
    "ternary": True,
    "model_type": "bitnet",
    "layers": 30,
    "hidden_size": 2560,
    "bytes": 1234567890,
    "licence": None,
    "last_used": "2026-11-26",
}
MODELS = [
    ("storyteller", "shipped", *models_commands.row_of({**FACTS, "licence": "cc0"})),
    (
        "org/x",
        models_commands.version_of({"revision": "main", "commit": "0123456789ab"}),
        *models_commands.row_of(FACTS),
    ),
    ("org/y", models_commands.version_of({"revision": None, "commit": "fedcba9876"}), *models_commands.row_of(FACTS)),
    ("z", "named", *models_commands.row_of({"error": "z is gone"})),
]
EQUAL_ANSWER = AnswerCheck("equal", "every field is equal", tokens=1, largest_logprob_error=1.234e-5)
ANSWERS = [
    EQUAL_ANSWER,
    AnswerCheck(
        "differs",
        "the answer is another one",
        tokens=12,
        fingerprint="fp_1",
        first_token=FirstToken(1, 3, OneToken(7, " fox", 0.2502), OneToken(8, " hen", 0.2500)),
        differences=[Difference("choices[0].finish_reason", "stop", None)],
    ),
    AnswerCheck("differs", "another", 2, first_token=FirstToken(0, 4, OneToken(None, "a", 0.5), OneToken(2, "b", 0.4))),
    AnswerCheck("differs", "it goes on", 2, first_token=FirstToken(0, 5, None, OneToken(None, "c"))),
    AnswerCheck.unchecked("it was sampled"),
]
CAUSES = [
    Diagnosis("sure", "a BOS too many", "leave it out", confirmed=True),
    Diagnosis("perhaps", "a penalty", "turn it off", confirmed=False, possible=True),
    Diagnosis("no", "a sampler", "-", confirmed=False),
]
STOPPED = Diagnoses(CAUSES)
STOPPED.stopped = "time"
FINDINGS = [
    Finding("error", "weights", "is torn", path="a/b.gguf", offset=0, field="a\nb\tc"),
    Finding("warning", "config", "is odd", field="key"),
    Finding("note", "tokenizer", "is old"),
    *(Finding("error", "weights", "has no rows", field=f"t{number}") for number in range(4)),
    *(Finding("error", "weights", f"has {number} rows", path="c", field="u") for number in range(4)),
]
LINES = [
    LineVerdict(name, status, f"{name} is computed", "y[0]", 1.0, 2.0)
    for name, status in (("norm", "right"), ("scale", "a choice"), ("round", "-"), ("product", "WRONG"))
]
NOTEBOOK = Graded(
    "a/03.ipynb", "03", [Grade("3.1", 2, 3, "part", "two of three"), Grade("3.2", 0, 1, "wrong", "no")], ["KeyError"]
)
ROWS = [("first", style_text("green one", "green"), "1"), ("second", "two [b] words", "22"), ("third", "\x1b[1m", "3")]


def tables(out):
    out.print(make_table(("|name", "what", ">|size"), ROWS, title="A title", style="cyan"))
    out.print(make_table(("", "", ""), ROWS))
    out.print(make_table(("|a", "b"), [("only one",)]))
    out.print(make_row(("a longer name", style_text("ok", "red"), "rest"), (5, 6, 4)))


DRAWINGS = {
    "doctor": lambda out: doctor_command.draw_installation(WHOLE, out),
    "doctor, little": lambda out: doctor_command.draw_installation(BARE, out),
    "doctor, without OpenMP": lambda out: doctor_command.draw_installation(
        replace(BARE, extension={"built": True, "openmp": False, "why": None}), out
    ),
    "doctor, checks": lambda out: [out.print(doctor_command.check_row(check)) for check in CHECKS],
    "doctor, checks, narrow": (lambda out: [out.print(doctor_command.check_row(check)) for check in CHECKS], 40),
    "doctor, verdicts": lambda out: [doctor_command.draw_verdict("so it is", agrees, out) for agrees in (True, False)],
    "kernels": lambda out: bench_command.draw_kernels(KERNELS, out),
    "kernels, wrong": lambda out: bench_command.draw_kernels(WRONG, out),
    "kernels, others": lambda out: bench_command.draw_kernels(
        replace(KERNELS, conditions=replace(BUSY, waited=0)), out
    ),
    "model": lambda out: bench_model.draw_model(MODEL, SHORT, out),
    "model, plain": lambda out: bench_model.draw_model(PLAIN, STORY, out),
    "model, unequal": lambda out: bench_model.draw_model(UNEQUAL, STORY, out),
    "model, both rules": lambda out: bench_model.draw_rule(RULE, out),
    "profile": lambda out: bench_model.draw_profile(PROFILE, out),
    "serve": lambda out: bench_command.draw_serve(SERVE, STORY, out),
    "serve, idle": lambda out: bench_command.draw_serve(replace(SERVE, points=(IDLE,), conditions=BUSY), SHORT, out),
    "serve, unequal": lambda out: bench_command.draw_serve(replace(SERVE, equal=False), STORY, out),
    "convert": lambda out: convert_command.draw(PROOF, out),
    "convert, equal": lambda out: convert_command.draw(
        Proof(Tally(2, 2), Tally(2, 2), Tally(3, 3), tokens=5, logits_equal=True), out
    ),
    "crossval": lambda out: crossval_command.draw(CROSSINGS, ["gone"], out),
    "crossval, no causes": lambda out: crossval_command.draw(CROSSINGS[:2], [], out, causes=False),
    "crossval, narrow": (lambda out: crossval_command.draw(CROSSINGS[:1], [], out), 60),
    "crossval, very narrow": (lambda out: crossval_command.draw(CROSSINGS[:1], [], out), 30),
    "crossval, backends": lambda out: crossval_command.draw_backends(CROSSINGS[:2], [], out),
    "precision": lambda out: crossval_command._draw_precision(PRECISION, out),
    "precision, without a card": lambda out: crossval_command._draw_precision(replace(PRECISION, device=None), out),
    "verification": lambda out: crossval_command._draw_verification(VERIFICATION, out),
    "verification, holds": lambda out: crossval_command._draw_verification(replace(VERIFICATION, refuted=[]), out),
    "linear": lambda out: crossval_command._draw_linear(LinearVerdict("mine.py", "torch 2", tuple(LINES)), out),
    "linear, right": lambda out: crossval_command._draw_linear(LinearVerdict("mine.py", "", tuple(LINES[:2])), out),
    "outputs": lambda out: crossval_outputs.draw_outputs([("a", "equal", True), ("b", "no", False)], STOPPED, out),
    "outputs, not told apart": lambda out: crossval_outputs.draw_outputs(
        [("a", "no", False)], Diagnoses([CAUSES[1]] * 2), out
    ),
    "outputs, equal": lambda out: crossval_outputs.draw_outputs([("a", "equal", True)], Diagnoses([CAUSES[2]]), out),
    "grades": lambda out: grade_command._draw(out, [NOTEBOOK]),
    "verify": lambda out: verify_command.draw([(f"line {n}", each) for n, each in enumerate(ANSWERS)], "numpy", out),
    "verify, one": lambda out: verify_command.draw([("", EQUAL_ANSWER)], "numpy", out),
    "perplexity": lambda out: evaluation_commands.draw(TEXTS, out),
    "tasks": lambda out: evaluation_commands.draw_tasks(TASKS, out),
    "models": lambda out: models_commands.draw(MODELS, out),
    "models, narrow": (lambda out: models_commands.draw(MODELS, out), 70),
    "models, very narrow": (lambda out: models_commands.draw(MODELS, out), 30),
    "tables": tables,
    "tables, narrow": (tables, 20),
    "tables, very narrow": (tables, 9),
    "inspect": lambda out: inspect_command.draw(report_of("bitnet-packed-offline"), out),
    "inspect, narrow": (lambda out: inspect_command.draw(report_of("llama-packed-bitlinear"), out), 60),
    "inspect, findings": lambda out: inspect_command.draw_findings(Inspection("m", findings=FINDINGS), out),
    "inspect, ASCII": (lambda out: inspect_command.draw(report_of("llama-packed-skips"), out), 100, "ascii"),
}


def report_of(case):
    return replace(inspect_model(GOLDEN / case), path=case)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DRAWINGS)
def test_what_is_drawn(name):
    assert draw_by_name(name) == json.loads(RECORDED.read_text())[name]


def draw_by_name(name):
    draw, *options = DRAWINGS[name] if isinstance(DRAWINGS[name], tuple) else (DRAWINGS[name],)
    return drawn(draw, *options)


if __name__ == "__main__":
    RECORDED.write_text(
        json.dumps({name: draw_by_name(name) for name in DRAWINGS}, indent=1, ensure_ascii=False) + "\n"
    )
