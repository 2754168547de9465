"""Crossval: the reference against this package's backends, other engines and recorded traces, op by op.

May import everything below it: `api` and the rooms that it uses. Engines are in `engines`, causes in `explain`.
"""

from .engines.bitnet_cpp import cross_bitnet_cpp
from .engines.outside import cross_engine
from .engines.written import EngineRun, run_written
from .opponents import cross_backends, cross_trace, default_tokens
from .precision import PrecisionBench, measure_precision
from .receipt import Verification, make_receipt, verify_receipt
from .report import Crossing, write_html
from .token_ids import long_tokens

__all__ = [
    "Crossing",
    "EngineRun",
    "PrecisionBench",
    "Verification",
    "cross_backends",
    "cross_bitnet_cpp",
    "cross_engine",
    "cross_trace",
    "default_tokens",
    "long_tokens",
    "make_receipt",
    "measure_precision",
    "run_written",
    "verify_receipt",
    "write_html",
]
