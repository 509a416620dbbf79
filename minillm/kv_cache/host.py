"""Host memory for KV blocks that a device has no room for: ids of places, handed out and taken back. Built in chapter 06."""

from __future__ import annotations


class HostPool:
    """`num_blocks` places in host memory, each as large as a block of all layers."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free_ids = list(range(num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def allocate(self, count: int) -> list[int]:
        """Raises ValueError when fewer are free."""
        if count > self.num_free:
            raise ValueError(f"{count} host blocks asked, {self.num_free} of {self.num_blocks} are free; raise host_kv_bytes")
        return [self.free_ids.pop() for _ in range(count)]

    def free(self, ids: list[int]) -> None:
        self.free_ids += ids
