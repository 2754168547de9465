"""Crossval: the reference against whatever else claims to run the same model. The comparisons are `tracing`'s."""

from .opponents import (
    Crossing,
    cross_backends,
    cross_trace,
    default_tokens,
    prepared_model,
    write_html,
)
from .verify import Verification, make_receipt, verify_receipt

__all__ = [
    "Crossing",
    "Verification",
    "cross_backends",
    "cross_trace",
    "default_tokens",
    "make_receipt",
    "prepared_model",
    "verify_receipt",
    "write_html",
]
