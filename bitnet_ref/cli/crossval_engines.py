"""`bitnet-ref crossval transformers | llama-cpp | onnxruntime | bitnet-cpp`: other people's engines."""

from __future__ import annotations

import shlex
from typing import Any

import click

from .crossval_command import crossval, finish, load_and_encode, load_reference, outputs, what_to_run
from .shell import common_options

_ENGINES = {
    "transformers": "Hugging Face transformers, float32 and bfloat16, eager attention.",
    "llama_cpp": "llama.cpp on GGUF files that are written for it: TQ1_0 and TQ2_0, or F32.",
    "onnxruntime": "onnxruntime on the file that `convert --to onnx` writes.",
}


def _register(name: str, summary: str) -> None:
    @crossval.command(name.replace("_", "-"), short_help=summary)
    @click.argument("model", default="storyteller")
    @what_to_run
    @click.option("--python", help="The interpreter that has the engine.  [default: this one]")
    @click.option("--only", multiple=True, metavar="NAME", help='One variant, such as "llama.cpp tq2_0".')
    @outputs
    @common_options
    def command(
        model: str,
        prompt: str | None,
        tokens: str | None,
        python: str | None,
        only: tuple[str, ...],
        **options: Any,
    ) -> None:
        from ..crossval import cross_engine

        loaded, ids = load_and_encode(model, prompt, tokens)
        loaded.check_tokens(ids)
        crossings = cross_engine(name, model, ids, python=python, only=only or None)
        finish(name, model, loaded, ids, crossings, **options)

    command.help = (
        f"Run MODEL in {summary}\n\nThe engine records each op that it can, which is then compared with the "
        "reference's. It may be in another interpreter: --python. Where it differs by design, the report says "
        "so, and the reference computes the same way."
    )


for _name, _summary in _ENGINES.items():
    _register(_name, _summary)


@crossval.command("bitnet-cpp", short_help="A built bitnet.cpp, or any program with llama-cli's options.")
@click.argument("model")
@click.argument("binary")
@click.option("--prompt", help="The text to continue.  [default: a sentence]")
@click.option("--max-tokens", default=32, show_default=True, type=click.IntRange(1), help="How many tokens.")
@click.option("--prints", type=click.Choice(["text", "ids"]), default="text", show_default=True, help="What it prints.")
@click.option("--options", default="--no-display-prompt", show_default=True, help="More options for the program.")
@outputs
@common_options
def bitnet_cpp(
    model: str, binary: str, prompt: str | None, max_tokens: int, prints: str, options: str, **outputs: Any
) -> None:
    """Run BINARY -m MODEL -p PROMPT -n N --temp 0 and compare its greedy tokens with the reference's.

    A MODEL that is not a GGUF is first written as one, with I2_S matrices.
    """
    from ..crossval import cross_bitnet_cpp
    from ..crossval.opponents import PROMPT

    given: dict[str, Any] = {"count": max_tokens, "prints": prints, "options": shlex.split(options)}
    text = PROMPT if prompt is None else prompt
    loaded = load_reference(model)
    crossing = cross_bitnet_cpp(model, binary, prompt=text, **given)
    ids = [] if crossing.greedy is None else loaded.tokenizer.encode(text)
    finish("bitnet_cpp", model, loaded, ids, [crossing], **outputs)
