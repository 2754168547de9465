"""What may follow a prompt, and what each sampling parameter changes: the stages between the logits and a choice.

The stages are computed by the functions of generation itself (`Rules.apply`, `sampling.distribution`), with one more
parameter at each, so they show exactly what is sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import GenerationError, TokenizerError
from ..generation.params import SamplingParams
from ..generation.sampling import distribution, likeliest
from ..generation.sequence import Request
from ..reference.cache import TokenBatch, TokenIds
from ..reference.layers import Floats
from .explorer import Explorer, Slider
from .figures import Figure, token_bars

# In the order in which they apply, each with the value that limits nothing
LIMITS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}


@dataclass(frozen=True, eq=False)
class Stage:
    """A distribution of the next token: `probabilities` (n,) of `ids` (n,), which sum to 1; all others are 0."""

    name: str  # "top_k 40"
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"<Stage {self.name}: {len(self.ids)} tokens, the most likely with p {self.probabilities.max():.3f}>"

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """The probabilities of these ids, 0 for those that were left out."""
        whole = np.zeros(1 + max(self.ids.max(), np.max(ids, initial=0)), dtype=np.float64)
        whole[self.ids] = self.probabilities
        return whole[ids]


class NextToken:
    """The model's own logits (V,) after a prompt (text or token ids), and the stages from them to a choice.

    Raises GenerationError, TokenizerError.
    """

    def __init__(self, model: LoadedModel, prompt: str | TokenIds) -> None:
        self.model = model
        self.ids = Request(model, prompt, SamplingParams(max_tokens=1)).prompt
        cache = model.new_cache(slots=1, capacity=len(self.ids))
        self.logits: Floats = model.run(TokenBatch.of([(0, 0, self.ids)], logits_of_last=[0]), cache).all()[0]

    def __repr__(self) -> str:
        (stage,), ids = self.stages(temperature=1.0), self.likeliest(4)
        tokens = ", ".join(f"{text} {p:.3f}" for text, p in zip(self.texts(ids), stage.of(ids), strict=True))
        return f"<bitnet_ref.NextToken after {len(self.ids)} tokens: {tokens}, ...>"

    def stages(self, **params: Any) -> list[Stage]:
        """From the model's own distribution to the one that a token is drawn from: one stage for each parameter of
        `SamplingParams` that changes or limits it."""
        sampling = SamplingParams.of(**{**params, "max_tokens": 1})
        if sampling.strategy is not None or sampling.num_beams > 1:
            raise GenerationError("strategy, num_beams: they choose without a distribution; leave them out")
        rules, _ = Request(self.model, self.ids, sampling).rules()
        neutral = SamplingParams(temperature=1.0)
        stages = [Stage("the model", *distribution(self.logits, neutral))]
        logits = rules.apply(self.ids, self.logits)
        if rules.processors:
            stages.append(Stage("rules", *distribution(logits, neutral)))
        if sampling.temperature == 0:
            best = np.array([np.argmax(logits)])
            return [*stages, Stage("temperature 0", best, np.ones(1))]
        given: dict[str, Any] = {"temperature": sampling.temperature}
        for name, none in LIMITS.items():
            if (value := getattr(sampling, name)) != none:
                given[name] = value
                stages.append(Stage(f"{name} {value:g}", *distribution(logits, SamplingParams(**given))))
        return stages

    def likeliest(self, count: int) -> NDArray[np.int64]:
        """The ids of the tokens that the model finds most likely, the most likely first."""
        return likeliest(self.logits.astype(np.float64), min(count, len(self.logits)))

    def texts(self, ids: NDArray[np.int64]) -> list[str]:
        """Each token as it would continue the prompt: "▁" is a space before it."""
        return token_texts(self.model, ids.tolist())

    def plot(self, count: int = 16, **params: Any) -> Figure:
        """A panel of bars for each stage, of the most likely tokens. Needs matplotlib."""
        ids = self.likeliest(count)
        return token_bars(self.texts(ids), [(stage.name, stage.of(ids)) for stage in self.stages(**params)])

    def explore(self, count: int = 16, **params: Any) -> Explorer:
        """The same with sliders for temperature, top_k, top_p and min_p in Jupyter; `params` are their first values.
        Without ipywidgets or a running kernel it shows the figure as it is."""
        # name: (first value, low, high, step)
        ranges = {"temperature": (1.0, 0.0, 2.0, 0.05), "top_k": (0, 0, 50, 1)}
        ranges |= {"top_p": (1.0, 0.05, 1.0, 0.05), "min_p": (0.0, 0.0, 0.5, 0.01)}
        sliders = [Slider(name, params.pop(name, value), *limits) for name, (value, *limits) in ranges.items()]
        ids = self.likeliest(count)

        def draw(**values: float) -> Figure:  # always the same panels, so that nothing moves but the bars
            stages = {stage.name.partition(" ")[0]: stage for stage in self.stages(**params, **values)}
            shown, last = [], stages["the"]
            for name in ("the", *(["rules"] if "rules" in stages else []), *ranges):
                last = stages.get(name, last)
                title = last.name if name in stages else f"{name}: no change"
                shown.append((title, last.of(ids)))
            return token_bars(self.texts(ids), shown)

        return Explorer(draw, sliders)


def token_texts(model: LoadedModel, ids: list[int]) -> list[str]:
    """Single tokens in a form that shows their spaces: " the" is "▁the". An id without text is "<id>"."""
    texts, tokenizer = [], model.tokenizer
    for token in ids:
        try:
            text = tokenizer.token_bytes(token).decode("utf-8", errors="backslashreplace").replace(" ", "▁")
            texts.append(text or tokenizer.id_to_token(token))
        except TokenizerError:  # past the tokenizer's vocabulary
            texts.append(f"<{token}>")
    return texts
