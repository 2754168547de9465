"""`/rerank` and `/score`: how well documents fit a query, by an embedding model or by a model that answers yes or no.

Sources: Jina's and Cohere's rerank (`/v1/rerank`), vLLM's `/score`. An embedding model's score is the cosine of the two
vectors. Another model's score is p(yes) / (p(yes) + p(no)) after the question of Qwen3-Reranker's model card.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...backends.loaded import LoadedModel
from ...generation.embed import is_of_sentence_transformers
from ...generation.score import score_groups
from . import schemas
from .fields import ignored
from .schemas import FLAG, MAYBE, TEXT, RequestError, describe_array, describe_number, describe_object

if TYPE_CHECKING:
    from .server import Server

DOCUMENT = {"anyOf": [TEXT, describe_object({"text": TEXT}, ("text",))]}
IGNORED = ignored(  # vLLM's, Cohere's and Jina's
    (
        *("user", "priority", "request_id", "mm_processor_kwargs", "activation", "use_activation", "additional_data"),
        *("max_tokens_per_doc", "max_chunks_per_doc", "rank_fields", "return_embeddings"),
    )
)
RERANK = {
    "model": MAYBE,
    "query": TEXT,
    "documents": describe_array(DOCUMENT, 1, 1024),
    "top_n": describe_number(1, 2**31 - 1, "integer"),
    "return_documents": FLAG,
    "instruction": MAYBE,
    **IGNORED,
}
ONE_OR_MORE = {"anyOf": [TEXT, describe_array(TEXT, 1, 1024)]}
SCORE = {"model": MAYBE, "text_1": ONE_OR_MORE, "text_2": ONE_OR_MORE, "instruction": MAYBE, **IGNORED}
RERANK_PATHS, SCORE_PATHS = ("/rerank", "/v1/rerank"), ("/score", "/v1/score")
for path in RERANK_PATHS:
    schemas.declare_body(path, "Documents in the order in which they fit a query.", RERANK, ("query", "documents"))
for path in SCORE_PATHS:
    schemas.declare_body(path, "How well pairs of texts fit.", SCORE, ("text_1", "text_2"))

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)


def make_routes(server: Server) -> list[Route]:
    async def rerank(request: Request) -> Response:
        body = await server.body(request)
        texts = [each if isinstance(each, str) else each["text"] for each in body["documents"]]
        scores, facts = await score_pairs(request, body, "rerank", [(body["query"], text) for text in texts])
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.get("top_n")]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if body.get("return_documents"):
            for each in results:
                each["document"] = {"text": texts[each["index"]]}
        return JSONResponse({**facts, "results": results})

    async def score(request: Request) -> Response:
        body = await server.body(request)
        first, second = ([text] if isinstance(text, str) else text for text in (body["text_1"], body["text_2"]))
        if len(first) not in (1, len(second)):
            raise RequestError(f"expected one text or {len(second)}, as text_2 has", "text_1")
        pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
        scores, facts = await score_pairs(request, body, "score", pairs)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        return JSONResponse({**facts, "data": data})

    async def score_pairs(
        request: Request, body: Mapping[str, Any], kind: str, pairs: list[tuple[str, str]]
    ) -> tuple[list[float], dict[str, Any]]:
        """The score of each pair, and what else the answer says."""
        instruction = body.get("instruction") or INSTRUCTION
        name, scores, tokens = await server.read_texts(
            request, body, lambda model: score_all(server, model, pairs, instruction)
        )
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return scores, {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "model": name, "usage": usage}

    routes = [Route(path, rerank, methods=["POST"]) for path in RERANK_PATHS]
    return routes + [Route(path, score, methods=["POST"]) for path in SCORE_PATHS]


async def score_all(
    server: Server, model: LoadedModel, pairs: list[tuple[str, str]], instruction: str
) -> tuple[list[float], int]:
    """The score of each pair, and the tokens that were read."""
    if is_embedding_model(model):
        texts = [*dict.fromkeys(text for pair in pairs for text in pair)]
        vectors, tokens = await server.embed(model, {"input": texts})
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        rows = dict(zip(texts, unit, strict=True))
        return [float(rows[first] @ rows[second]) for first, second in pairs], tokens
    parts = await server.compute_rows(partial(judge_pairs, model, instruction), pairs)
    return [score for scores, _ in parts for score in scores], sum(tokens for _, tokens in parts)


def is_embedding_model(model: LoadedModel) -> bool:
    """Whether it was made for vectors: it takes the mean, or has sentence-transformers' files beside it."""
    return model.config.pooling == "mean" or is_of_sentence_transformers(model.texts_path)


def judge_pairs(model: LoadedModel, instruction: str, pairs: list[tuple[str, str]]) -> tuple[list[float], int]:
    """p(yes) against p(no) for each pair, and the tokens that were read."""
    tokenizer = model.tokenizer
    groups = []
    for query, document in pairs:
        question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        if tokenizer.chat_template is None:
            ids = tokenizer.encode(f"{JUDGE}\n\n{question}\n\nAnswer:")
        else:
            messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": question}]
            variables = {"enable_thinking": False}
            ids = tokenizer.apply_chat_template(messages, tokenize=True, variables=variables)
        groups.append((ids, [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]))
    pairs_of_scores = score_groups(model, groups)
    scores = [float(1 / (1 + np.exp(np.clip(no.total - yes.total, -700, 700)))) for yes, no in pairs_of_scores]
    return scores, sum(len(ids) for ids, _ in groups)
