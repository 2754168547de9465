"""bitnet-ref chat: lines in, answers out, in a terminal and without one."""

import json
import signal
import subprocess

from cli_runs import BACKEND, FAST, SLOW, invoke, process
from helpers import model as shared_model


def chat_lines(*messages, model, args=(), code=0):
    stdin = "".join(f"{message}\n" for message in messages)
    result = invoke("chat", "--model", model, "--max-tokens", 6, "--json", *args, *FAST, stdin=stdin)
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
    long = "word " * 120
    first, failed, reset, fine = chat_lines(long, long, "/reset", "Hello", model=chat_model, code=2)
    assert first["finish_reason"] in ("length", "stop")
    assert failed["error"]["type"] == "ContextOverflow"
    assert "context is 256; /reset starts a new one" in failed["error"]["message"]
    assert reset == {"reset": True}
    assert fine["token_ids"]


def test_chat_for_people(chat_model):
    text = "Hello\n\n/reset\n" + "word " * 300 + "\n/exit\n"
    result = invoke("chat", "--model", chat_model, "--max-tokens", 6, *FAST, stdin=text)
    assert result.exit_code == 0
    model = shared_model(chat_model, BACKEND, threads=1)
    ids = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=True)
    assert result.stdout == model.generate(ids, max_tokens=6).text + "\n"
    assert "a new conversation" in result.stderr
    assert "shorten the message" in result.stderr
    assert result.stdout.count("\x1b") == 0


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
