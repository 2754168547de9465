"""Crossval: the reference against whatever else claims to run the same model. The comparisons are `tracing`'s."""

from .engines.bitnet_cpp import cross_bitnet_cpp
from .engines.outside import cross_engine, cross_engine_on
from .opponents import (
    Crossing,
    cross_backends,
    cross_trace,
    default_tokens,
    prepared_model,
    write_html,
)
from .precision import PrecisionBench, PrecisionError, measure_precision
from .receipts import Verification, make_receipt, verify_receipt
from .table import Table, cross_all
from .token_ids import Greedy, compare_ids, compare_text

__all__ = [
    "Crossing",
    "Greedy",
    "PrecisionBench",
    "PrecisionError",
    "Table",
    "Verification",
    "compare_ids",
    "compare_text",
    "cross_all",
    "cross_backends",
    "cross_bitnet_cpp",
    "cross_engine",
    "cross_engine_on",
    "cross_trace",
    "default_tokens",
    "make_receipt",
    "measure_precision",
    "prepared_model",
    "verify_receipt",
    "write_html",
]
