"""crossval of training: torch's step agrees; each known mistake is told by the gradients it makes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file
from training.test_trainer import CASES, folder_of, golden_of

from bitnet_ref.cli import cli
from bitnet_ref.crossval.gradients import MISTAKES, Mistake, TrainingStep, cross_gradients, judge
from bitnet_ref.errors import FormatError
from bitnet_ref.training import Trainer

SETTINGS = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.5, "max_norm": 0.5}


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    trainer = Trainer.from_folder(folder_of("bitnet-relu2", tmp_path_factory.mktemp("case")))
    for master in trainer.masters.values():  # the initial norms are 1, which hides mistakes
        if master.ndim == 1:
            master *= np.linspace(0.5, 1.5, len(master), dtype=np.float32)
    return TrainingStep(trainer, golden_of("bitnet-relu2")["tokens"][0], SETTINGS)


@pytest.mark.parametrize("case", CASES)
def test_torch_agrees(case, tmp_path):
    golden, folder = golden_of(case), folder_of(case, tmp_path / case)
    trace = {name: value for name, value in golden.items() if name.startswith("grad.")}
    trace |= {"tokens": golden["tokens"][0], "loss": golden["losses"][:1]}
    save_file(trace, tmp_path / "trace.safetensors")
    verdict = cross_gradients(folder, tmp_path / "trace.safetensors")
    assert verdict.agrees, verdict.sentence
    assert len(verdict.distances) == len(trace) - 1


FIRST = {
    "RMSNorm's gradient": "grad.model.layers.1.mlp.down_proj.weight",
    "dW is made": "grad.model.layers.1.mlp.down_proj.weight",
    "the ReLU^2 gate": "grad.model.layers.1.mlp.gate_proj.weight",
    "queries' and keys'": "grad.model.layers.1.self_attn.k_proj.weight",
    "the tied matrix": "grad.model.embed_tokens.weight",
    "norms and biases": "master.model.norm.weight",
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.description[:40])
def test_each_mistake_is_named(mistake, step):
    verdict = judge(step, step.take(mistake))
    assert verdict.cause == mistake.description
    for words, first in FIRST.items():
        if mistake.description.startswith(words):
            assert verdict.first_wrong == first


def test_a_common_factor_is_named(step):
    theirs = step.take(masters=False)
    tokens = step.tokens.size - len(step.tokens)
    summed = {name: value * (tokens if name.startswith("grad.") else 1) for name, value in theirs.items()}
    assert "summed over the tokens" in str(judge(step, summed).cause)


def test_a_mistake_on_no_list_has_no_cause(step):
    def spoil(trainer, gradients, tokens):
        name = "model.layers.0.mlp.up_proj.weight"
        return gradients | {name: gradients[name][::-1].copy()}

    verdict = judge(step, step.take(Mistake("", {}, spoil), masters=False))
    assert (verdict.agrees, verdict.cause) == (False, None)
    assert verdict.first_wrong == "grad.model.layers.0.mlp.up_proj.weight"


def test_the_command(step, tmp_path):
    folder = folder_of("bitnet-relu2", tmp_path / "case")
    own = TrainingStep(Trainer.from_folder(folder), step.tokens, SETTINGS)
    mistake = next(m for m in MISTAKES if m.description.startswith("Adam's"))
    metadata = {"optimizer": json.dumps(SETTINGS)}
    for trace, code, words in ((own.take(), 0, "AGREES"), (own.take(mistake), 1, "bias correction")):
        tensors = {name: value.astype(np.float32) for name, value in trace.items()}
        save_file(tensors | {"tokens": step.tokens}, tmp_path / "trace.safetensors", metadata)
        done = CliRunner().invoke(cli, ["crossval", "trace", str(folder), str(tmp_path / "trace.safetensors")])
        assert done.exit_code == code, done.output
        assert words in " ".join(done.stdout.split())
    command = ["crossval", "trace", str(folder), str(tmp_path / "trace.safetensors"), "--receipt", str(tmp_path / "r")]
    refused = CliRunner().invoke(cli, command)
    assert (refused.exit_code, "--receipt are of a trace of a run" in refused.output) == (2, True)
    assert not (tmp_path / "r").exists()


def test_bad_traces(step, tmp_path):
    folder, path = folder_of("bitnet-relu2", tmp_path / "case"), tmp_path / "trace.safetensors"
    gradient = {"grad.model.norm.weight": np.ones(64, np.float32)}
    save_file(gradient, path)
    with pytest.raises(FormatError, match="needs the tensor tokens"):
        cross_gradients(folder, path)
    for wrong in ({"grad.nothing": np.ones(1)}, {"grad.model.norm.weight": np.ones(3)}):
        save_file(wrong | {"tokens": step.tokens}, path)
        with pytest.raises(FormatError, match="no tensor of this model's training step"):
            cross_gradients(folder, path)
    save_file(gradient | {"tokens": step.tokens}, path, {"optimizer": "[1]"})
    with pytest.raises(FormatError, match="AdamW's settings"):
        cross_gradients(folder, path)
