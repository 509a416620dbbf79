"""A disk and host memory that are dictionaries, for tests of the tiers."""

from __future__ import annotations

from concurrent.futures import Future

from minillm.kv_cache.manager import BlockMoves
from tests.helpers.block_memory import BlockMemory


class Read(Future):
    """Lands when it is waited for."""

    def __init__(self, shelf):
        super().__init__()
        self.shelf = shelf

    def result(self, timeout=None):
        self.shelf.land()
        return super().result(timeout)


class Shelf:
    """A disk that is a dictionary, with files that can be lost; what is fetched is there at once, or when it lands."""

    def __init__(self, at_once: bool = True):
        self.files, self.at_once, self.pending, self.touched, self.kept = {}, at_once, [], [], {}

    def __contains__(self, block_hash):
        return block_hash in self.files

    def fetch(self, block_hash):
        read = Read(self)
        self.pending.append((read, block_hash))
        if self.at_once:
            self.land()
        return read

    def touch(self, block_hash):
        self.touched.append(block_hash)

    def write(self, block_hash, data):
        self.files[block_hash] = data

    def keep(self, block_hash, data):
        self.kept[block_hash] = data

    def land(self):
        for read, block_hash in self.pending:
            read.set_result(self.files.get(block_hash))
        self.pending.clear()


class TieredMemory(BlockMemory):
    """A `BlockMemory` that makes the copies to and from a shelf too."""

    def __init__(self, block_size, shelf=None, **settings):
        super().__init__(block_size, **settings)
        self.shelf = shelf

    def execute(self, output):
        self.move(output.moves)
        return super().execute(output)

    def move(self, moves: BlockMoves):
        for place, block_hash in moves.to_disk:
            self.shelf.write(block_hash, self.host[place])
        for block, place in moves.swap_out:
            self.host[place] = self._block(block)
        for block_hash, place in moves.from_disk:
            self.host[place] = self.shelf.kept.pop(block_hash)
        moves.swap_out = []
