"""What a reader of a run needs to know of the machine that made the load; only what can be read."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

_SIOCGIFADDR, _SIOCETHTOOL = 0x8915, 0x8946
_ETHTOOL_GCOALESCE, _ETHTOOL_GGRO = 0x0E, 0x2B
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


def interface_facts(family: int, address: tuple[Any, ...]) -> dict[str, Any]:
    """The network interface that leads to an address, and what of it delays or merges packets before their stamp.

    Parameters
    ----------
    family : int
        AF_INET or AF_INET6.
    address : tuple
        As `socket.connect` takes it.

    Returns
    -------
    dict
        `interface`, `driver`, `gro` (whether packets are merged), `rx_usecs` (interrupt moderation); None for what
        can't be read.

    Examples
    --------
    >>> sorted(interface_facts(socket.AF_INET, ("127.0.0.1", 80)))
    ['driver', 'gro', 'interface', 'rx_usecs']
    """
    name = _interface(family, address)
    if name is None:
        return dict.fromkeys(("interface", "driver", "gro", "rx_usecs"))
    driver = Path(f"/sys/class/net/{name}/device/driver")
    gro, coalescing = _ethtool(name, _ETHTOOL_GGRO, 2), _ethtool(name, _ETHTOOL_GCOALESCE, 23)
    return {
        "interface": name,
        "driver": driver.resolve().name if driver.exists() else None,
        "gro": None if gro is None else bool(gro),
        "rx_usecs": coalescing,
    }


def _interface(family: int, address: tuple[Any, ...]) -> str | None:
    """The interface that bears the address from which packets to `address` would leave."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
    if family == socket.AF_INET6:
        digits = socket.inet_pton(family, own.partition("%")[0]).hex()
        lines = (_read("/proc/net/if_inet6") or "").splitlines()
        return next((line.split()[-1] for line in lines if line.startswith(digits)), None)
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == own), None)


def _ipv4_of(name: str) -> str | None:
    reply = _ioctl(_SIOCGIFADDR, struct.pack("16s24x", name.encode()))
    return socket.inet_ntoa(reply[20:24]) if reply else None


def _ethtool(name: str, command: int, words: int) -> int | None:
    """The first word of what the driver answers to an ethtool command."""
    answer = array("I", [command] + [0] * (words - 1))
    asked = struct.pack("16sP16x", name.encode(), answer.buffer_info()[0])
    return answer[1] if _ioctl(_SIOCETHTOOL, asked) else None


def _ioctl(request: int, argument: bytes) -> bytes | None:
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            return fcntl.ioctl(sock, request, argument)
        except OSError:
            return None


def peak_memory_bytes() -> int:
    """The most memory that this process has had in use so far.

    Examples
    --------
    >>> peak_memory_bytes() > 1_000_000
    True
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1024 if sys.platform == "linux" else 1)  # macOS counts in bytes


def _processor() -> str | None:
    lines = (_read("/proc/cpuinfo") or "").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
