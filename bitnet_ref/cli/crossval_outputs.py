"""`bitnet-ref crossval tokens`, `openai` and `sample`: engines that show nothing but their outputs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .crossval_command import budget_option, load_reference, seconds, text_options
from .shell import DIFFERS, LoadingBar, common_options, make_table, report, style_text

if TYPE_CHECKING:
    from rich.console import Console

    from ..crossval.explain.diagnose import Diagnoses
    from ..crossval.outputs.draws import SampleVerdict
    from ..crossval.outputs.served import Served
    from ..crossval.outputs.vectors import ServedVectors

KEY_VARIABLE = "OPENAI_API_KEY"
_FILE = click.Path(path_type=Path)
_DTYPE = click.option(
    "--dtype",
    "engine_dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="What the engine computes in.",
)


def draw_outputs(rows: list[tuple[str, str, bool]], causes: Diagnoses, out: Console) -> None:
    """The verdicts (name, line, whether it agrees), then the causes."""
    table = [(name, style_text(verdict, "green" if agrees else "red")) for name, verdict, agrees in rows]
    out.print(make_table(("|", ""), table))
    certain = [cause for cause in causes if cause.confirmed]
    possible = [cause for cause in causes if cause.possible]
    if certain or possible:
        out.print()
    if len(possible) > 1:
        out.print("These cannot be told apart, or too few tokens speak for one of them:")
    for cause in (*certain, *possible):
        out.print(style_text(str(cause)))
    if causes.stopped:
        out.print(style_text(f"the search for causes ended early: {causes.stopped}", "yellow"))


def report_outputs(name: str, verdict: Served | ServedVectors | SampleVerdict, remark: str = "", **facts: Any) -> None:
    """Show a verdict and its causes, and exit with it. facts: more of them, for --json."""
    rows = [(name, f"{verdict.verdict}{remark}", verdict.agrees)]
    code = 0 if verdict.agrees else DIFFERS
    report({**facts, **verdict.to_dict()}, lambda out: draw_outputs(rows, verdict.causes, out), code)


@click.command("tokens", short_help="Token ids that an engine chose greedily.")
@click.argument("model")
@click.argument("file", type=_FILE)
@text_options("The prompt of runs that have none, as a text.")
@_DTYPE
@budget_option
@click.option("--no-causes", is_flag=True, help="Do not look for the cause of a difference.")
@common_options
def tokens_command(
    model: str, file: Path, text: str | list[int] | None, engine_dtype: str, budget: float, no_causes: bool
) -> None:
    """Compare the greedy token ids in FILE with MODEL on the reference.

    The reference computes the logits of the prompt and the given ids in one pass. Each id must be the largest logit, up
    to near ties. Where one is not, the cause is looked for in how generation was driven: BOS, templates, penalties,
    sampling, stops, positions and the cache of new tokens.

    FILE is JSON, JSON lines or text; crossval/README.md has the format.
    """
    from dataclasses import replace

    from ..crossval.explain.diagnose import Diagnoses
    from ..crossval.outputs.causes import explain_tokens, judge_tokens
    from ..crossval.outputs.files import read_runs

    loaded = load_reference(model)
    runs = read_runs(file, loaded, text)
    runs = [run if run.engine_dtype != "float32" else replace(run, engine_dtype=engine_dtype) for run in runs]
    judged = [judge_tokens(loaded, run) for run in runs]
    agrees = all(each.agrees for each in judged)
    causes = Diagnoses()
    if not agrees and not no_causes:
        with LoadingBar("looking for the cause") as bar:
            causes = explain_tokens(loaded, runs, progress=bar.tell, budget_s=budget)
    names = [file.name if len(runs) == 1 else f"{file.name}, run {number}" for number in range(1, len(runs) + 1)]
    facts = {
        "model": model,
        "agrees": agrees,
        "runs": [
            {"prompt": list(run.prompt), "tokens": list(run.tokens), **greedy.to_dict()}
            for run, greedy in zip(runs, judged, strict=True)
        ],
        "causes": [cause.to_dict() for cause in causes],
        "stopped": causes.stopped,
    }
    rows = [(name, greedy.verdict, greedy.agrees) for name, greedy in zip(names, judged, strict=True)]
    report(facts, lambda out: draw_outputs(rows, causes, out), 0 if agrees else DIFFERS)


def _json_object(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(value)
        if isinstance(fields, dict):
            return fields
    raise click.BadParameter("""expected a JSON object, such as '{"repeat_penalty": 1}'""")


@click.command("openai", short_help="A server with OpenAI's HTTP API.")
@click.argument("url")
@click.argument("model")
@click.option("--served-model", metavar="NAME", help="The server's name of the model.  [default: its first one]")
@click.option("--api-key", envvar=KEY_VARIABLE, show_envvar=True, help="The server's key.")
@click.option("--prompt", "prompts", multiple=True, help="What to send; may be repeated.  [default: some sentences]")
@click.option("--max-tokens", default=48, show_default=True, type=click.IntRange(1), help="New tokens of each prompt.")
@click.option("--embeddings", is_flag=True, help="Compare the vectors of /v1/embeddings instead.")
@click.option(
    "--body", default="{}", callback=_json_object, metavar="JSON", help="Fields that each request has as well."
)
@click.option("--timeout", default="300s", show_default=True, callback=seconds, metavar="TIME", help="Of one request.")
@_DTYPE
@budget_option
@common_options
def openai_command(
    url: str,
    model: str,
    served_model: str | None,
    api_key: str | None,
    prompts: tuple[str, ...],
    embeddings: bool,
    max_tokens: int,
    body: dict[str, Any],
    timeout: float,
    engine_dtype: str,
    budget: float,
) -> None:
    """Compare what the server at URL answers with MODEL on the reference.

    Prompts go to /v1/completions, as token ids where the server takes them. Log probabilities, the prompt's tokens and
    token ids are compared where it has them; else greedy tokens, or their text. A server that penalises repetitions
    unless it is told otherwise (llama-cpp-python) is told so by --body '{"repeat_penalty": 1}'.
    """
    from ..crossval.outputs.client import Client
    from ..crossval.outputs.served import cross_server
    from ..crossval.outputs.vectors import cross_vectors

    client = Client(url, served_model, api_key or None, timeout, body)
    loaded = load_reference(model)
    if embeddings:
        vectors = cross_vectors(loaded, client, texts=prompts, engine_dtype=engine_dtype)
        report_outputs(client.url, vectors, model=model)
        return
    with LoadingBar("asking the server") as bar:
        served = cross_server(
            loaded,
            client,
            prompts=prompts,
            max_tokens=max_tokens,
            engine_dtype=engine_dtype,
            progress=bar.tell,
            budget_s=budget,
        )
    report_outputs(client.url, served, f" (the server offers {served.offers})", model=model)


@click.command("sample", short_help="Logits, sampling parameters, and what an engine chose.")
@click.argument("file", type=_FILE)
@common_options
def sample_command(file: Path) -> None:
    """Which rule of sampling does an engine have wrong, by its probabilities or the tokens that it chose?

    FILE is .npz or .json, with logits, sampling parameters, and probabilities or chosen ids; crossval/README.md has the
    format. Probabilities are compared exactly. Chosen ids are judged by how likely they are, and by ids that cannot be.
    """
    from ..crossval.outputs.draws import judge_draws
    from ..crossval.outputs.files import read_draws

    report_outputs(file.name, judge_draws(read_draws(file)))
