"""Prefix hashes: a name for a block that says all that came before it. Built in chapter 07.

    hash of block 0 = SHA-256(root,            tokens of block 0)
    hash of block 1 = SHA-256(hash of block 0, tokens of block 1)

Keys and values of a token depend on every token before it, so a block may be reused only where the whole prefix is
the same: the chain says exactly that. The root holds all else that changes them. SHA-256 and not Python's `hash()`:
a user who can make two prefixes collide reads another user's text, and a cache on disk must mean the same tomorrow.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(**what: object) -> bytes:
    """The start of a chain: model, dtype, block size, adapter, a tenant's salt, by name. Order does not matter."""
    text = "\n".join(f"{name}={value!r}" for name, value in sorted(what.items()))
    return hashlib.sha256(text.encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: 32 bytes of its tokens and of the chain before it."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def extend_chain(chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append to `chain` until it names the first `num_blocks` blocks of `token_ids`.

    Raises ValueError if one of them is not full: its name would be that of another text.
    """
    if num_blocks * block_size > len(token_ids):
        raise ValueError(
            f"{num_blocks} blocks of {block_size} tokens are not full: the text has {len(token_ids)} tokens"
        )
    for index in range(len(chain), num_blocks):
        parent = chain[-1] if chain else root
        chain.append(hash_block(parent, token_ids[index * block_size : (index + 1) * block_size]))
