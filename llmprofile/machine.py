"""What a reader of a run needs to know of the machine that made the load; only what can be read."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("llmprofile", "numpy", "pandas", "pyarrow", "aiohttp", "httptools", "joblib")


def versions() -> dict[str, str]:
    """Python's version and those of the packages that a measurement depends on.

    Examples
    --------
    >>> "numpy" in versions()
    True
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine_facts() -> dict[str, Any]:
    """Host, kernel, processor, cores, governor and load; None for what can't be read.

    Examples
    --------
    >>> machine_facts()["cores"] >= 1
    True
    """
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "load_1min": os.getloadavg()[0],
        "busy_poll": _read("/proc/sys/net/core/busy_poll"),
    }


def machine_counters() -> dict[str, float]:
    """Counters of the whole machine whose growth over a run tells of disturbance.

    Returns
    -------
    dict
        `steal_s`, time that the hypervisor took; `softirq_squeezes`, how often the network's softirq ran out of
        budget. Empty where there is no /proc.
    """
    counters: dict[str, float] = {}
    cpu, softnet = _read("/proc/stat"), _read("/proc/net/softnet_stat")
    if cpu is not None:
        counters["steal_s"] = int(cpu.split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK")
    if softnet is not None:
        counters["softirq_squeezes"] = sum(int(line.split()[2], 16) for line in softnet.splitlines())
    return counters


def _processor() -> str | None:
    lines = (_read("/proc/cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
