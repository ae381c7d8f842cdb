"""Asks a server's /livez again and again, until its standard input ends, and prints the seconds of each answer, a line each.

A program of its own: in one that also reads two hundred streams, its question would wait for those, not for the server.

    python benchmarks/liveness.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys
import threading
import time

import httpx

EVERY_S = 0.05


def main(url: str) -> None:
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    with httpx.Client(base_url=url, timeout=600) as client:
        while not is_over.wait(EVERY_S):
            began = time.perf_counter()
            client.get("/livez").raise_for_status()
            print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
