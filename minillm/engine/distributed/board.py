"""Board: what each worker is doing, and that it is alive, for the process that waits for it. Built in chapter 20.

    rank 0   heartbeat 812   "computes step 17: 3 requests, 40 tokens"
    rank 1   heartbeat 809   "waits for a step"

A thread of each worker counts its heartbeat up. Where the count stands still the process is stopped, or holds the
interpreter; a worker that only computes for long has a heartbeat.
"""

from __future__ import annotations

import mmap
import threading
import time

PERIOD = 0.1  # seconds between two heartbeats
ROW, WORD = 256, 8  # bytes of a rank, of its heartbeat


class Board:
    """A row of shared memory for each rank."""

    def __init__(self, fd: int, num_ranks: int):
        self.memory = mmap.mmap(fd, self.num_bytes(num_ranks))

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        return ROW * num_ranks

    def say(self, rank: int, text: str) -> None:
        """What a rank does from now on."""
        start = ROW * rank + WORD
        self.memory[start : start + ROW - WORD] = text.encode()[: ROW - WORD - 1].ljust(ROW - WORD, b"\0")

    def said(self, rank: int) -> str:
        start = ROW * rank + WORD
        return self.memory[start : start + ROW - WORD].split(b"\0", 1)[0].decode(errors="replace")

    def heartbeat(self, rank: int) -> int:
        return int.from_bytes(self.memory[ROW * rank : ROW * rank + WORD], "little")

    def beat(self, rank: int) -> None:
        self.memory[ROW * rank : ROW * rank + WORD] = (self.heartbeat(rank) + 1).to_bytes(WORD, "little")

    def start_heart(self, rank: int) -> None:
        """A thread that counts this rank's heartbeat up for as long as the process runs."""

        def run() -> None:
            while True:
                self.beat(rank)
                time.sleep(PERIOD)

        threading.Thread(target=run, name="heart", daemon=True).start()

    def close(self) -> None:
        self.memory.close()


def state_of(pid: int) -> str | None:
    """The letter that Linux has for what a process is at: "T" is stopped by a signal; None where it does not say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
