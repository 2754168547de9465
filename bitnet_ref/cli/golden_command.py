"""`bitnet-ref golden`: small files in every format, with the logits that they give."""

from __future__ import annotations

import warnings
from pathlib import Path

import click

from ..errors import ConfigError, StorageError
from .shell import OutputPath, common_options, make_table, print_json, show, size_in_words, wants_json


@click.command(short_help="Write small models in every format, with their logits.")
@click.argument("out", type=OutputPath())
@common_options
def golden(out: Path) -> None:
    """Write tiny random models in every type and container into the new folder OUT, with the logits that they give.

    For authors of kernels and readers: OUT/README.md says what lies where and how to compare, OUT/files.json lists the
    files. The logits are those of the reference in float32 and float64, with activations rounded per token, as BitNets
    are trained, and by blocks, as llama.cpp rounds them. The same version writes the same bytes.
    """
    from ..crossval.golden import MODELS, write_golden

    with warnings.catch_warnings():  # that planes of PrismML's types may be rotated: here they are not
        warnings.simplefilter("ignore")
        try:
            files = write_golden(out)
        except StorageError as error:
            if error.errno is not None:  # the system refuses it
                raise
            raise ConfigError(str(error)) from None
    if wants_json():
        print_json({"path": str(out), "files": [file._asdict() for file in files]})
        return
    rows = [(file.path, size_in_words(file.nbytes), file.engine) for file in files]
    show(lambda console: console.print(make_table(("|file", ">|size", "|runs in"), rows)))
    total = size_in_words(sum(file.nbytes for file in files))
    click.echo(f"{out}: {len(files)} files, {total}; README.md says how to compare")
    if len(files) < sum(len(tiny.targets) for tiny in MODELS):
        click.echo("without ONNX: pip install 'bitnet-ref[onnx]'")
