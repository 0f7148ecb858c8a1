"""Measure LLM servers from a notebook, and the error of the measurement with them.

Names are loaded when first used: a worker process that only sends requests need not import plotting.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "batches": ("DXG1", "MXG1", "thinned"),
    "bias": ("separate_bias",),
    "capacity": ("Sweep", "run_sweep"),
    "collect": ("load",),
    "errors": ("LlmprofileError", "LlmprofileWarning", "UsageError"),
    "estimate": ("estimate_bias", "processes_needed"),
    "explore": ("explore_queue", "explore_run"),
    "fitting": ("fit_batch", "fit_mg1"),
    "gated": ("GatedLoop", "simulate_loop"),
    "htmlreport": ("report",),
    "launch": ("run_load", "start_load"),
    "lindley": ("simulate",),
    "loopfit": ("fit_loop",),
    "metrics": ("summary", "inter_token_s"),
    "prompts": ("PromptFile", "SharedPrefix"),
    "queueing": ("GG1", "MD1", "MG1", "MGk", "MM1"),
    "records": ("Run",),
    "selfreport": ("count_tokens", "timing_differences", "token_mismatches"),
    "saturation": ("Saturation", "find_saturation"),
    "scrape": ("server_metrics", "server_samples"),
    "server": ("ReferenceServer",),
    "slo": ("Goodput", "goodput"),
    "stages": ("Ramp", "Stages"),
    "steady": ("Steadiness", "steady_state"),
    "supervise": ("Load", "Progress"),
    "sweep": ("fit_sweep",),
    "traces": ("Trace",),
    "trust": ("Verdict", "verdict"),
    "widgets": ("watch",),
    "windows": ("window",),
    "workload": (
        *("ClosedLoop", "Constant", "Conversation", "Gamma", "Poisson"),
        *("Empirical", "Fixed", "Lognormal", "Normal", "Uniform"),
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted([*_HOME_OF, "plots"])


def __getattr__(name: str) -> Any:
    if name == "plots":
        return importlib.import_module("llmprofile.plots")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"llmprofile.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'llmprofile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
