"""Every command's arguments and options, as they were recorded: names, types, limits, defaults.

When a change is meant, running this file records it.
"""

import json
from pathlib import Path

import click
import pytest
from helpers import DATA

from bitnet_ref.cli import cli

RECORDED = DATA / "cli" / "options.json"
FACTS = ("required", "nargs", "multiple", "default", "is_flag", "envvar", "section", "metavar", "show_default")
USUAL = ("False", "None", "1", "()", "''", "Options", "Sentinel.UNSET")  # is not recorded
TYPE_FACTS = ("choices", "min", "max", "min_open", "max_open", "exists", "file_okay", "dir_okay", "separator", "count")


def flat(command, name=""):
    """{"bench kernels": {"repeats": "--repeats IntRange min=1 default=7", ...}, ...}"""
    if isinstance(command, click.Group):
        facts = {name: options_of(command)} if name else {"": options_of(command)}
        for each, inner in command.commands.items():
            facts |= flat(inner, f"{name} {each}".strip())
        return facts
    return {name: options_of(command)}


def options_of(command):
    found = {}
    for param in command.params:
        kind = {name: str(getattr(param.type, name)) for name in TYPE_FACTS if hasattr(param.type, name)}
        facts = {name: str(getattr(param, name, None)) for name in FACTS}
        usual = {name: value for name, value in facts.items() if value not in USUAL}
        words = [f"{name}={value}" for name, value in {**kind, **usual}.items() if value not in ("None", "False")]
        found[param.name] = " ".join([", ".join(param.opts), type(param.type).__name__, *words])
    return found


def recorded_commands():
    return flat(cli)


@pytest.mark.parametrize("command", recorded_commands())
def test_the_options_of_a_command(command):
    assert recorded_commands()[command] == json.loads(RECORDED.read_text())[command]


def test_no_command_is_gone():
    assert list(recorded_commands()) == list(json.loads(RECORDED.read_text()))


if __name__ == "__main__":
    Path(RECORDED).parent.mkdir(exist_ok=True)
    lines = [
        f'"{command}": {{\n'
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(words)}" for name, words in options.items())
        + "\n}"
        for command, options in recorded_commands().items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
