"""What is read of the machine is what the machine says elsewhere."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys

import numpy as np
import pytest

from llmprofile.machine import interface_facts, machine_counters, machine_facts, versions


def test_facts_are_plain_and_true() -> None:
    facts = machine_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cores"] == os.cpu_count() and facts["host"] == platform.node()
    assert versions()["numpy"] == np.__version__
    assert versions()["python"] == platform.python_version()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and asks the kernel about its interfaces")
def test_counters_grow_and_loopback_is_known() -> None:
    before, after = machine_counters(), machine_counters()
    assert set(before) == {"steal_s", "softirq_squeezes"}
    assert all(after[name] >= before[name] for name in before)
    for family, address in ((socket.AF_INET, ("127.0.0.1", 9)), (socket.AF_INET6, ("::1", 9, 0, 0))):
        if family == socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):  # noqa: PTH110
            continue
        facts = interface_facts(family, address)
        assert facts["interface"] in (None, "lo")
        assert facts["driver"] is None
    assert interface_facts(socket.AF_INET, ("127.0.0.1", 9))["interface"] == "lo"
    assert isinstance(interface_facts(socket.AF_INET, ("127.0.0.1", 9))["gro"], bool)
