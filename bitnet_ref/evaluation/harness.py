"""lm-eval's tasks on a model of this package (the extra `eval`): lm-eval calls `TaskModel`, `evaluate` runs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ..api import Model
from ..errors import ConfigError, GenerationError
from ..generation.results import Generation
from ..generation.score import score_groups
from ..serving.tickets import RequestHandle
from .perplexity import prefix_token

CONTEXTS_AT_A_TIME = 16
MAX_NEW_TOKENS = 256  # lm-eval's default
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is there
Progress = Callable[[int, int], None]
Request = tuple[Any, list[int], list[int]]  # texts, context, continuation


class TaskModel(TemplateLM):
    """A model as lm-eval sees it. Continuations are scored in batches that compute each context once; texts go through
    the engine. Contexts that are too long are cut on their left, as lm-eval's own models do.

    length: tokens that the model reads at a time; None: its context.
    """

    def __init__(self, model: Model, length: int | None = None, progress: Progress = lambda done, total: None) -> None:
        super().__init__()
        if length is not None and length > model.context_length:
            message = f"expected at most {model.context_length} (the model's context), got {length}"
            raise ConfigError(message, field="length")
        self.model, self.tokenizer, self.max_length = model, model.tokenizer, length or model.context_length
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        return next(iter(self.tokenizer.eos_ids), self.prefix_token_id)

    @property
    def prefix_token_id(self) -> int:
        return prefix_token(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """None: BOS where the tokenizer's files say so."""
        return self.tokenizer.encode(string, add_special_tokens is not False)

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(chat_history, add_generation_prompt)

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[tuple[float, bool]]:
        by_context: dict[tuple[int, ...], list[int]] = {}
        for number, (texts, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                limit = f"expected 1 to {self.max_length}"
                raise GenerationError(f"a continuation of {len(continuation)} tokens, {limit}: {str(texts)[:200]!r}")
            room = self.max_length + 1 - len(continuation)  # the last token is not read
            by_context.setdefault(tuple(context[-room:]), []).append(number)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        contexts, done = list(by_context.items()), 0
        for first in range(0, len(contexts), CONTEXTS_AT_A_TIME):
            some = contexts[first : first + CONTEXTS_AT_A_TIME]
            groups = [(list(ids), [requests[number][2] for number in numbers]) for ids, numbers in some]
            for (_context, numbers), scores in zip(some, score_groups(self.model, groups), strict=True):
                for number, score in zip(numbers, scores, strict=True):
                    results[number] = score.total, score.is_greedy
                done += len(numbers)
            self._progress(done, len(requests))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p of each text, whose tokens have no BOS of their own: they follow `prefix_token_id`."""
        windows, owners = list[Request](), list[int]()
        for number, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((text, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, scored in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += scored[0]
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts, running = list[str](), deque[tuple[RequestHandle, list[str]]]()
        with self.model.engine() as engine:
            for number, (context, given) in enumerate((request.args for request in requests), 1):
                params = read_generation(given, self.max_length)
                ids = self.tok_encode(context)[-(self.max_length - params["max_tokens"]) :]
                running.append((engine.submit(ids, **params), params["stop"]))
                while running and (number == len(requests) or len(running) > engine.config.max_batch):
                    handle, stops = running.popleft()
                    texts.append(cut(handle.result(), stops))
                    self._progress(len(texts), len(requests))
        return texts


def cut(result: Generation, stops: Sequence[str]) -> str:
    """The text before each stop in their order, as lm-eval's own models have it: of two that overlap the first listed
    counts, not the one that begins first."""
    text = result.text + (result.stop_reason if isinstance(result.stop_reason, str) else "")
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def read_generation(given: Mapping[str, Any], length: int) -> dict[str, Any]:
    """lm-eval's parameters of a text as this package's. Greedy without a temperature, and with `do_sample` False."""
    rest = dict(given)
    until = rest.pop("until", None) or []
    lengths = [value for name in LENGTHS if (value := rest.pop(name, None)) is not None]
    samples, temperature = rest.pop("do_sample", None), float(rest.pop("temperature", 0.0))
    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    params: dict[str, Any] = {name: rest[name] for name in names if name in rest}
    return {
        **params,
        "stop": [until] if isinstance(until, str) else [text for text in until if text],
        "max_tokens": min(int(lengths[0]) if lengths else MAX_NEW_TOKENS, max(1, length // 2)),
        "temperature": temperature if samples is not False else 0.0,
        "seed": 0,
    }


def evaluate(
    model: Model,
    tasks: Sequence[str],
    *,
    folders: Sequence[str | Path] = (),
    shots: int | None = None,
    limit: int | None = None,
    length: int | None = None,
    with_chat_template: bool = False,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """The results of lm-eval's `simple_evaluate`, without its samples.

    tasks: names of tasks, groups or tags, or patterns like "mmlu_*". folders: of more tasks, YAML files. shots:
    examples before each question; None: the task's own number. limit: so many documents of each task. Raises
    ConfigError for no such task, and what the tasks raise.
    """
    manager = _task_manager(tasks, [str(folder) for folder in folders])
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(f"lm-eval has no task {', '.join(unknown)}; folders of more tasks: --include", field="tasks")
    results = simple_evaluate(
        TaskModel(model, length, progress),
        tasks=manager.match_tasks(list(tasks)),
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        apply_chat_template=with_chat_template,
        log_samples=False,
        bootstrap_iters=1000,
    )
    chosen = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
    return {name: results[name] for name in chosen if name in (results or {})}


def _task_manager(tasks: Sequence[str], folders: list[str]) -> TaskManager:
    """The index of the tasks in these folders, and of lm-eval's own unless the folders have all that are asked for by
    name: its thousands of files take seconds to read."""
    if folders:
        ours = TaskManager(include_path=folders, include_defaults=False)
        if set(tasks) <= set(ours.all_subtasks):
            return ours
    return TaskManager(include_path=folders or None)
