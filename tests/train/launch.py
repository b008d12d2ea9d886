#!/usr/bin/env python3
"""Starts a command as several processes, with the variables that torchrun or srun set, and
waits until all have ended by themselves: it ends none of them.

    launch.py [--as torchrun|srun] [--strangers] [--seconds S] RANKS COMMAND ...

--strangers connect to the port first and say things that no rank says. The status is that
of the first process that failed, 99 if one still ran after S (60) seconds.
"""

import argparse
import hashlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Dict, List

MAGIC = struct.pack("=Q", 0x316B6E61726C6C69)


def free_port() -> int:
    """A port that is free, and so is the one after it."""
    while True:
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            port = int(a.getsockname()[1])
            try:
                b.bind(("127.0.0.1", port + 1))
                return port
            except (OSError, OverflowError):
                continue


def variables(launcher: str, port: int, rank: int, ranks: int) -> Dict[str, str]:
    out = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if launcher == "torchrun":
        return {**out, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**out, "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(ranks),
            "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def token(env: Dict[str, str]) -> bytes:
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
             "SLURM_STEP_ID")
    return hashlib.sha256(b"".join(env.get(n, "").encode() + b"\0" for n in names)).digest()


def call(port: int, say: bytes) -> None:
    """Connects as soon as somebody listens, says it, and goes."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as s:
                s.sendall(say)
                s.settimeout(5)
                if s.recv(64) == b"":
                    return
                sys.exit(f"a stranger who said {say[:16]!r} got an answer")
        except ConnectionResetError:
            return
        except ConnectionRefusedError:
            time.sleep(0.01)


def strangers(port: int, env: Dict[str, str]) -> List[threading.Thread]:
    noise = random.Random(5)
    rank = struct.pack("=ii", 1, 2)
    said = [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 200, bytes(64), b"\n" * 5,
            MAGIC + bytes(32) + b"0.1.0".ljust(16, b"\0") + rank,
            MAGIC + token({"SLURM_JOB_ID": "8"}) + b"\xff" * 24,
            noise.randbytes(100000)]
    threads = [threading.Thread(target=call, args=(port, s)) for s in said]
    for t in threads:
        t.start()
    return threads


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--as", dest="launcher", default="torchrun")
    parser.add_argument("--strangers", action="store_true")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("ranks", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    o = parser.parse_args()
    port = free_port()
    begin = time.monotonic()

    def start(rank: int) -> "subprocess.Popen[bytes]":
        env = variables(o.launcher, port, rank, o.ranks)
        return subprocess.Popen(o.command, env={**os.environ, **env})

    jobs = [start(0)]
    if o.strangers:
        env = variables(o.launcher, port, 0, o.ranks)
        for t in strangers(port + (o.launcher == "torchrun"), env):
            t.join()
    jobs += [start(rank) for rank in range(1, o.ranks)]
    status = 0
    for job in jobs:
        try:
            ended = job.wait(max(0.1, o.seconds - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            job.kill()
            ended = 99
        status = status or (128 - ended if ended < 0 else ended)
    return status


if __name__ == "__main__":
    sys.exit(main())
