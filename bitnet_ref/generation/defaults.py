"""The sampling that a model's own files recommend, for callers who say nothing about it.

`Model.generate` and the engines in Python are greedy where a caller says nothing: two backends then give one text. What
people talk with (`serve`, `batch`, `chat` and `generate` in the shell) takes the model's own defaults.
"""

from __future__ import annotations

from typing import Any

from ..backends.loaded import LoadedModel
from ..errors import GenerationError, TokenizerError
from .params import SamplingParams


def recommended_sampling(model: LoadedModel) -> dict[str, Any]:
    """The parameters of `SamplingParams` that generation_config.json, or a GGUF's general.sampling.*, recommends.

    Empty where the files recommend nothing, or there is no tokenizer. Raises GenerationError for one out of its range.
    """
    try:
        recommended = dict[str, Any](model.tokenizer.recommended_sampling)
    except TokenizerError:
        return {}
    try:
        SamplingParams.of(**recommended)
    except GenerationError as error:
        message = f"the model's generation_config.json recommends what no request may ask for: {error.message}; correct"
        raise GenerationError(f"{message} it, or take generation_defaults plain", field=error.field) from error
    return recommended
