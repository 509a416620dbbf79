"""The files of the lowest tier: kept by their use, bounded, never wrong."""

from __future__ import annotations

import os
import threading
import warnings

import pytest
import torch

from minillm.kv_cache.disk import HEADER, MOST_WAITING, DiskStore

BYTES = 64


def block(name: int) -> tuple[bytes, torch.Tensor]:
    return bytes([name]) * 32, torch.full((BYTES,), name, dtype=torch.uint8)


def test_a_store_keeps_blocks_by_their_use_and_the_next_process_takes_them_up(tmp_path):
    room = 3 * (HEADER.size + BYTES)
    store = DiskStore(tmp_path / "kv", room, BYTES, "model one")
    for name in (1, 2, 3):
        store.write(*block(name))
    store.flush()
    store.touch(block(1)[0])
    store.write(*block(4))
    assert block(2)[0] not in store and len(store) == 3
    assert torch.equal(store.fetch(block(4)[0]).result(), block(4)[1])  # written already or not
    store.close()
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [
        f"{block(name)[0].hex()}.kv" for name in (1, 3, 4)
    ]
    for age, name in enumerate((4, 1, 3)):
        os.utime(store.path(block(name)[0]), (1000 + age, 1000 + age))
    again = DiskStore(tmp_path / "kv", room - 1, BYTES, "model one")  # room for two
    assert list(again.files) == [block(1)[0], block(3)[0]]
    assert torch.equal(again.fetch(block(1)[0]).result(), block(1)[1])
    assert list(again.files) == [block(3)[0], block(1)[0]]
    again.close()
    with pytest.raises(ValueError, match="disk_kv_bytes=10 holds no block; a block takes 140 bytes"):
        DiskStore(tmp_path, 10, BYTES, "model one")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"disk_kv_path='.*file' cannot be used"):
        DiskStore(str(tmp_path / "file"), room, BYTES, "model one")


def test_foreign_and_damaged_files_are_named_and_never_a_hit(tmp_path):
    store = DiskStore(tmp_path, 10**6, BYTES, "model one")
    for name in range(1, 6):
        store.write(*block(name))
    store.close()
    whole = {name: store.path(block(name)[0]) for name in range(1, 6)}
    whole[1].write_bytes(whole[1].read_bytes()[:-1])  # cut off
    whole[2].write_bytes(whole[2].read_bytes()[:20])
    whole[3].rename(tmp_path / f"{'ab' * 32}.kv")  # another's name
    changed = bytearray(whole[4].read_bytes())
    changed[-1] ^= 1
    whole[4].write_bytes(changed)
    (tmp_path / "notes.kv").write_text("x" * 300)
    (tmp_path / "readme.txt").write_text("not ours, not looked at")
    with pytest.warns(UserWarning, match="holds files that are skipped: .* and 1 more") as said:
        again = DiskStore(tmp_path, 10**6, BYTES, "model one")
    reasons = sorted(again.skipped.values())
    assert len(said) == 1 and [reason[:16] for reason in reasons] == [
        "139 bytes, a blo",
        "cut off after 20",
        "holds block 0303",
        "no block of keys",
    ]
    assert set(again.files) == {block(4)[0], block(5)[0]}
    with pytest.warns(UserWarning, match="0404.*its bytes are not those that were written"):
        assert again.fetch(block(4)[0]).result() is None
    assert block(4)[0] not in again
    again.write(*block(4))  # computed again, it takes the damaged one's place
    again.flush()
    assert torch.equal(again.fetch(block(4)[0]).result(), block(4)[1])
    again.close()
    # The others are another's, which is no fault.
    with pytest.warns(UserWarning, match="notes.kv: no block of keys and values$"):
        assert len(DiskStore(tmp_path, 10**6, BYTES, "model two")) == 0
    assert len(list(tmp_path.glob("*.kv"))) == 6  # there was room: nothing was deleted


def test_the_bound_is_that_of_the_folder_whatever_it_was_used_with(tmp_path):
    """Whoever changes the model or the dtype keeps what there is room for, and no byte beyond."""
    room = 6 * (HEADER.size + BYTES)

    def names() -> list[int]:
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) <= room
        return sorted(int(path.stem[:2], 16) for path in tmp_path.glob("*.kv") if path.stem != "notes")

    def store(layout: str, block_bytes: int = BYTES) -> DiskStore:
        return DiskStore(tmp_path, room, block_bytes, layout)

    first = store("model one")
    for name in range(1, 6):
        first.write(*block(name))
    first.close()
    for age, name in enumerate((4, 1, 3, 5, 2)):
        os.utime(first.path(block(name)[0]), (1000 + age, 1000 + age))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = store("model two", 2 * BYTES)  # a block takes 204 bytes instead of 140
    assert len(second) == 0 and names() == [1, 2, 3, 4, 5]
    for name in (6, 7):
        second.write(block(name)[0], block(name)[1].repeat(2))
        second.flush()
    assert names() == [2, 3, 5, 6, 7]  # of 840 bytes 408 are ours, 420 others': the two oldest have gone
    for name in (8, 9, 10):
        second.write(block(name)[0], block(name)[1].repeat(2))
        second.flush()
    assert names() == [7, 8, 9, 10]  # first all that another left, then one's own
    second.close()
    again = store("model one")
    assert len(again) == 0 and names() == [7, 8, 9, 10]
    again.write(*block(1))
    again.flush()
    assert names() == [1, 8, 9, 10] and len(again) == 1
    again.close()
    assert (
        names() == [1, 8, 9, 10]
        and DiskStore(tmp_path, 140, BYTES, "model one").path(block(1)[0]).exists()
        and names() == [1]
    )


def test_a_disk_that_cannot_keep_up_is_left_behind(tmp_path):
    """What waits to be written takes memory, so only so much may wait; what may not is a miss, and counted."""
    store = DiskStore(tmp_path, 10**6, BYTES, "model one")
    gate = threading.Event()
    store.writer.submit(gate.wait)
    for name in range(MOST_WAITING + 3):
        store.write(*block(name))
    assert (
        store.num_dropped == 3
        and len(store) == MOST_WAITING == len(store.waiting)
        and block(MOST_WAITING)[0] not in store
    )
    assert torch.equal(store.fetch(block(5)[0]).result(), block(5)[1])  # from memory: it is not in a file yet
    gate.set()
    store.close()
    assert len(list(tmp_path.iterdir())) == MOST_WAITING and not store.waiting


def test_what_cannot_be_written_is_said_and_forgotten(tmp_path):
    store = DiskStore(tmp_path / "kv", 10**6, BYTES, "model one")
    (tmp_path / "kv").rmdir()
    with pytest.warns(UserWarning, match="could not be written to .*kv, it is not kept"):
        store.write(*block(1))
        store.flush()
    assert block(1)[0] not in store
    # Whoever still asks for it finds nothing, which is no fault: it may have been evicted.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.fetch(block(1)[0]).result() is None
