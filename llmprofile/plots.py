"""Pictures of results: each function takes a result and draws it on an Axes, and estimates nothing.

The list of them all; they live in `runplots` (runs) and `queueplots` (models and fits), their look in `style`.
"""

from __future__ import annotations

from llmprofile.runplots import clocks, error_against_rate, latency, ntpot, timeline
from llmprofile.style import blank_axes, save

__all__ = ["blank_axes", "clocks", "error_against_rate", "latency", "ntpot", "save", "timeline"]
