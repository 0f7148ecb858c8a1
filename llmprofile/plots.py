"""Pictures of results: each function takes a result and draws it on an Axes, and estimates nothing.

The list of them all; they live in `runplots` (runs), `serverplots` (a server's metrics) and `queueplots` (models and
fits), their look in `style`.
"""

from __future__ import annotations

from llmprofile.queueplots import dispersion, inflation, qq, sample_path, wait_against_rate, wait_distribution
from llmprofile.runplots import (
    clocks,
    compare,
    decomposition,
    error_against_rate,
    latency,
    ntpot,
    ntpot_against_tpot,
    ntpot_by_length,
    timeline,
)
from llmprofile.serverplots import server_side
from llmprofile.style import blank_axes, save

__all__ = [
    "blank_axes",
    "clocks",
    "compare",
    "decomposition",
    "dispersion",
    "error_against_rate",
    "inflation",
    "latency",
    "ntpot",
    "ntpot_against_tpot",
    "ntpot_by_length",
    "qq",
    "sample_path",
    "save",
    "server_side",
    "timeline",
    "wait_against_rate",
    "wait_distribution",
]
