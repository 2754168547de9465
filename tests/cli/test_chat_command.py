"""bitnet-ref chat: lines in, answers out, in a terminal and without one."""

import json
import re
import signal
import subprocess

import pytest
from cli_runs import BACKEND, FAST, SLOW, invoke, process
from helpers import chat_folder
from helpers import model as shared_model

import bitnet_ref
from bitnet_ref.cli.chat_command import choose_params, repeats_itself

GREEDY = ("--temperature", "0")


def chat_lines(*messages, model, args=(), code=0, sampling=GREEDY):
    stdin = "".join(f"{message}\n" for message in messages)
    result = invoke("chat", "--model", model, "--max-tokens", 6, "--json", *sampling, *args, *FAST, stdin=stdin)
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_chat_needs_a_template():
    result = invoke("chat", *FAST, "--model", "storyteller", stdin="Hello\n")
    assert result.exit_code == 2
    assert "base model" in result.stderr
    assert "bitnet-ref generate" in result.stderr


def test_chat_keeps_and_forgets_the_history(chat_model):
    model = shared_model(chat_model, BACKEND, threads=1)
    one, two, reset, again = chat_lines("Hello", '{"content": "Who are\\nyou?"}', "/reset", "Hello", model=chat_model)
    history = [{"role": "user", "content": "Hello"}]
    assert one["prompt_token_ids"] == model.tokenizer.apply_chat_template(history, tokenize=True)
    assert one["token_ids"] == model.generate(one["prompt_token_ids"], max_tokens=6).token_ids
    history += [{"role": "assistant", "content": one["text"]}, {"role": "user", "content": "Who are\nyou?"}]
    assert two["prompt_token_ids"] == model.tokenizer.apply_chat_template(history, tokenize=True)
    assert reset == {"reset": True}
    assert again["token_ids"] == one["token_ids"]


def test_chat_system_text_and_exit(chat_model):
    model = shared_model(chat_model, BACKEND, threads=1)
    (only,) = chat_lines("Hello", "/exit", "Not said", model=chat_model, args=("--system", "Be brief"))
    history = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    assert only["prompt_token_ids"] == model.tokenizer.apply_chat_template(history, tokenize=True)


def test_chat_context_overflow(chat_model):
    long, refuse = "word " * 120, ("--overflow", "error")
    first, failed, reset, fine = chat_lines(long, long, "/reset", "Hello", model=chat_model, args=refuse, code=2)
    assert first["finish_reason"] in ("length", "stop")
    assert failed["error"]["type"] == "ContextOverflow"
    assert "context is 256; /reset starts a new one" in failed["error"]["message"]
    assert reset == {"reset": True}
    assert fine["token_ids"]


def test_chat_for_people(chat_model):
    text = "Hello\n\n/reset\n" + "word " * 300 + "\n/exit\n"
    result = invoke("chat", "--model", chat_model, "--max-tokens", 6, *GREEDY, *FAST, stdin=text)
    assert result.exit_code == 0
    assert f"[{chat_model}, {BACKEND}, greedy]" in result.stderr
    model = shared_model(chat_model, BACKEND, threads=1)
    ids = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=True)
    assert result.stdout == model.generate(ids, max_tokens=6).text + "\n"
    assert "a new conversation" in result.stderr
    assert "shorten the message" in result.stderr
    assert result.stdout.count("\x1b") == 0


@pytest.mark.thorough
def test_a_full_conversation_drops_its_oldest_turns(chat_model):
    system = ("--system", "Be brief")
    lines = [f"This is sentence number {n}, and it is not a short one at all." for n in range(12)]
    answers = chat_lines(*lines, model=chat_model, args=system)
    model = shared_model(chat_model, BACKEND, threads=1)
    dropped = [answer["stats"]["dropped_messages"] for answer in answers]
    assert sum(dropped) >= 4
    history = [{"role": "system", "content": "Be brief"}]
    for line, answer, count in zip(lines, answers, dropped, strict=True):
        assert count % 2 == 0  # whole turns
        history = [history[0], *history[1 + count :], {"role": "user", "content": line}]
        assert answer["prompt_token_ids"] == model.tokenizer.apply_chat_template(history, tokenize=True)
        assert len(answer["prompt_token_ids"]) + 6 <= model.config.context_length
        history.append({"role": "assistant", "content": answer["text"]})
    stdin = "".join(f"{line}\n" for line in lines)
    shown = invoke("chat", "--model", chat_model, "--max-tokens", 6, *system, *FAST, stdin=stdin)
    assert "[the oldest 2 messages dropped: the context is full]" in shown.stderr


@pytest.mark.thorough
def test_why_an_answer_was_cut(chat_model):
    for args, remark in (
        ((), "[cut: the context is full]"),
        (("--max-tokens", 5), "[cut at --max-tokens]"),
        (("--overflow", "error"), "[the context is full: /reset starts anew]"),
    ):
        result = invoke("chat", "--model", chat_model, "--ignore-eos", *args, *FAST, stdin="Hello\n")
        assert remark in result.stderr


@pytest.mark.thorough
def test_an_answer_that_repeats_itself_is_stopped():
    """storychat with a bias to one word, greedy; as it samples by default it does not repeat itself."""
    first = ("chat", "--system", "The old king sat by the fire.", *FAST)
    (no,) = shared_model("storychat", BACKEND, threads=1).tokenizer.encode("no", False)
    biased = (*first, *GREEDY, "--logit-bias", f"{no}=100")
    question = "Are you afraid of the dragon?\n"
    (answer,) = map(json.loads, invoke(*biased, "--json", stdin=question).stdout.splitlines())
    assert (answer["finish_reason"], answer["token_ids"]) == ("repetition", [no] * 48)
    shown = invoke(*biased, stdin=question)
    assert "[stopped: it says the same again and again]" in shown.stderr
    assert shown.stdout == answer["text"] + "\n"
    for seed in range(4):
        (answer,) = map(json.loads, invoke(*first, "--seed", seed, "--json", stdin=question).stdout.splitlines())
        assert answer["finish_reason"] == "stop"
    poem = [*range(100, 115)] * 3
    assert not repeats_itself(poem)
    assert repeats_itself(poem * 2)


def test_the_seed_after_the_largest_is_0(chat_model):
    answers = chat_lines("Hello", "Hello", model=chat_model, sampling=("--seed", 2**64 - 1))
    assert [answer["seed"] for answer in answers] == [2**64 - 1, 0]


@pytest.mark.parametrize(("word", "says"), [("storychat", "--model storychat"), ("Hello", "then type your message")])
def test_chat_takes_no_words(word, says):
    result = invoke("chat", word)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.thorough
def test_answers_are_sampled_as_the_model_recommends(chat_model):
    """Each answer with a seed of its own, which is shown."""
    args = {"model": chat_model, "sampling": ("--seed", 7)}
    lines = ("Hello", "And then?", "/reset", "Hello")
    first, second, reset, again = chat_lines(*lines, **args)
    assert chat_lines(*lines, **args) != chat_lines(*lines, model=chat_model)
    assert [one["seed"] for one in (first, second, again)] == [7, 8, 9]
    assert reset == {"reset": True}
    model = shared_model(chat_model, BACKEND, threads=1)
    for one in (first, second, again):
        out = model.generate(one["prompt_token_ids"], max_tokens=6, temperature=0.8, top_k=40, seed=one["seed"])
        assert one["token_ids"] == out.token_ids
    shown = invoke("chat", "--model", chat_model, *FAST, stdin="")
    assert re.search(rf", {BACKEND}, temperature 0.8, top-k 40, seed \d+\]", shown.stderr)


@pytest.mark.parametrize(
    ("generation", "given", "expected"),
    [
        ({}, {}, {"temperature": 0.7, "top_p": 0.95}),
        ({"do_sample": True}, {}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "top_p": 0.9, "temperature": 0.6}, {}, {"temperature": 0.6, "top_p": 0.9, "top_k": 50}),
        ({"do_sample": False, "top_p": 0.9}, {}, {"temperature": 0.0}),
        ({"temperature": 0.5}, {"top_k": 3}, {"temperature": 0.5, "top_k": 3}),
        ({"temperature": "hot", "min_p": True}, {}, {"temperature": 0.7, "top_p": 0.95}),
        ({"top_k": 9}, {}, {"temperature": 0.7, "top_p": 0.95, "top_k": 9}),
        (
            *({"temperature": 0.5, "repetition_penalty": 1.2}, {"temperature": 0.0}),
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ),
    ],
)
def test_the_parameters_of_a_chat(generation, given, expected, tmp_path):
    folder = chat_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **generation}))
    params = choose_params(bitnet_ref.load(folder, backend="numpy"), given)
    assert ("seed" in params) == (expected["temperature"] > 0)
    params.pop("seed", None)
    assert params == {"overflow": "truncate", **expected}
    plain = choose_params(bitnet_ref.load(folder, backend="numpy"), given, "plain")
    assert {**plain, "seed": 0} == {"overflow": "truncate", "temperature": 0.7, "top_p": 0.95, "seed": 0, **given}


def test_ctrl_c_stops_only_the_answer(chat_model):
    child = process(
        "chat", "--model", chat_model, "--max-tokens", 200, *SLOW, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdin.write(b"Hello\n")
    child.stdin.flush()
    assert child.stdout.read(3)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(b"/reset\n/exit\n", timeout=60)
    assert child.returncode == 0
    assert b"stopped" in err
    assert b"a new conversation" in err
    assert b"Traceback" not in err
