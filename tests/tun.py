"""A network of one wire that loses, holds back and delays packets when told to: a TUN device and a process that relays.

The device has the address `HERE`. What is sent to `THERE` comes out of it, and goes back in with source and
destination swapped: so a client that connects to `THERE` reaches the server that listens at `HERE`, and each sees
the other at `THERE`. Swapping leaves all checksums as they were. Run as a program, this is the relay. Both addresses
are in a network namespace of the tests' own: nothing outside has to do with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from joblib.externals.loky import get_reusable_executor

_TUNSETIFF, _IFF_TUN_NO_PI, _IFF_UP = 0x400454CA, 0x1001, 1
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_SYN, _ACK = 2, 16
_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """A network namespace for this thread and all that it starts; skips the test where there can be none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        pytest.skip("a network of the test's own needs Linux")
    with Path("/proc/thread-self/ns/net").open() as before:
        if libc.unshare(_CLONE_NEWNET):
            pytest.skip(f"a network of the test's own needs root: {os.strerror(ctypes.get_errno())}")
        try:
            get_reusable_executor().shutdown()  # workers that are there already live in the network before
            _bring_up(b"lo")
            yield
        finally:
            get_reusable_executor().shutdown()
            assert libc.setns(before.fileno(), _CLONE_NEWNET) == 0


def _bring_up(name: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", name, _IFF_UP))


@dataclass(frozen=True)
class Disturbance:
    """What happens to packets on their way.

    Attributes
    ----------
    every : int
        Which of the server's packets with new data are held back: every so many-th. 0: none.
    marker : str
        Only packets that contain this count.
    hold_s : float
        For how long, whatever follows; infinite: lost, once.
    connect_s : float
        By how much the first packet of each connection is late.
    """

    every: int = 0
    marker: str = ""
    hold_s: float = 0.0
    connect_s: float = 0.0


@contextlib.contextmanager
def wire(port: int, **disturbance: Any) -> Iterator[Wire]:
    """A wire, in `own_network`, to the server that listens on this port; skips the test where there can be none."""
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("a wire that disturbs packets needs /dev/net/tun, and to be root")
    asked = json.dumps({"port": port, "net": os.getpid() % 256} | asdict(Disturbance(**disturbance)))
    command = [sys.executable, __file__, asked]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert relay.stdin is not None
    assert relay.stdout is not None
    with relay:
        said = json.loads(relay.stdout.readline())
        if "error" in said:
            pytest.skip(f"a TUN device can't be had here: {said['error']}")
        yield Wire(said["there"], relay)
        relay.stdin.close()


class Wire:
    """The address where the client finds the server, and how much was held back."""

    def __init__(self, host: str, relay: subprocess.Popen[str]) -> None:
        self.host = host
        self._relay = relay

    def held(self) -> int:
        """How many packets were held back or lost since this was asked last."""
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write("?\n")
        self._relay.stdin.flush()
        held: int = json.loads(self._relay.stdout.readline())
        return held


def _device(net: int) -> tuple[int, str]:
    """A TUN device that is up: its descriptor, and the address behind it."""
    here, there = f"198.18.{net}.1", f"198.18.{net}.2"  # of the range that is set aside for tests of networks
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"", _IFF_TUN_NO_PI))[:16]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for what, address in ((_SIOCSIFADDR, here), (_SIOCSIFNETMASK, "255.255.255.0")):
            fcntl.ioctl(control, what, struct.pack("16sHH4s16x", name, socket.AF_INET, 0, socket.inet_aton(address)))
    _bring_up(name)
    return tun, there


class _Relay:
    def __init__(self, tun: int, port: int, disturbance: Disturbance) -> None:
        self.tun, self.port, self.disturbance = tun, port, disturbance
        self.marker = disturbance.marker.encode()
        self.later: list[tuple[float, int, bytes]] = []
        self.order = itertools.count()
        self.counted = self.held = 0
        self.newest: dict[int, int] = {}  # the highest sequence number that a client's port was sent
        self.until_s: dict[tuple[int, int], float] = {}  # of what is held: by port and sequence number

    def run(self) -> None:
        while True:
            now_s = time.monotonic()
            while self.later and self.later[0][0] <= now_s:
                os.write(self.tun, heapq.heappop(self.later)[2])
            wait_s = self.later[0][0] - now_s if self.later else None
            ready = select.select([self.tun, 0], [], [], wait_s)[0]
            if self.tun in ready:
                self.take(os.read(self.tun, 65536))
            if 0 in ready:
                if not os.read(0, 4096):
                    return
                _say(self.held)
                self.held = 0

    def take(self, packet: bytes) -> None:
        """Pass a packet on, now, later or not at all."""
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return  # IPv6 says hello to its neighbours
        head = 4 * (packet[0] & 15)
        source, target, sequence = struct.unpack_from("!HHI", packet, head)
        body = packet[head + 4 * (packet[head + 12] >> 4) :]
        back = packet[:12] + packet[16:20] + packet[12:16] + packet[20:]
        delay_s = 0.0
        if source == self.port and body:
            delay_s = self.hold(target, sequence, body)
        elif packet[head + 13] & (_SYN | _ACK) == _SYN:
            delay_s = self.disturbance.connect_s
            self.newest.pop(source, None)
        if delay_s == 0.0:
            os.write(self.tun, back)
        elif delay_s < float("inf"):
            heapq.heappush(self.later, (time.monotonic() + delay_s, next(self.order), back))

    def hold(self, port: int, sequence: int, body: bytes) -> float:
        """For how long a packet with data is held; a copy of one that is held comes no sooner, so is dropped."""
        if sequence <= self.newest.get(port, -1):
            return float("inf") if time.monotonic() < self.until_s.get((port, sequence), 0.0) else 0.0
        self.newest[port] = sequence
        if not self.disturbance.every or self.marker not in body:
            return 0.0
        self.counted += 1
        if self.counted % self.disturbance.every:
            return 0.0
        self.held += 1
        hold_s = self.disturbance.hold_s
        if hold_s < float("inf"):
            self.until_s[port, sequence] = time.monotonic() + hold_s
        return hold_s


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _main() -> None:
    asked = json.loads(sys.argv[1])
    port, net = asked.pop("port"), asked.pop("net")
    try:
        tun, there = _device(net)
    except OSError as error:
        _say({"error": str(error)})
        return
    _say({"there": there})
    _Relay(tun, port, Disturbance(**asked)).run()


if __name__ == "__main__":
    _main()
