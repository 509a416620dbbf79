"""What the checks of chapter 07 say to a mistake that they know. Built in chapter 07."""

from __future__ import annotations

CHAIN_MISTAKES = {
    (
        "A hash takes only the tokens of its own block; without the hash before, "
        "the same block after another beginning is a hit."
    ): "no parent",
    (
        "Every block has the root for its parent; the hash before is needed, "
        "or the same block after another beginning is a hit."
    ): "root",
    "The salt is missing: two tenants with the same text share their blocks.": "no salt",
    "The salt enters every block anew; it belongs into the root, and the chain carries it on.": "salt in every block",
    "There is a hash for the last block although it is not full: what is in it still changes.": "partial",
    "The hash before comes first in your bytes; here the tokens come first, then the hash before.": "parent first",
    "Your tokens take 8 bytes each, here they take 4.": "8 bytes",
    "Your tokens are written with the highest byte first (big-endian), here the lowest comes first.": "big-endian",
    (
        "Each hash covers the tokens of the whole text so far; here it covers those of its block, "
        "and the chain covers the rest."
    ): "whole prefix",
    "The first block has the salt itself for its parent, not the SHA-256 of the salt.": "salt for root",
}
POOL_MISTAKES = {
    (
        "The blocks of a table join the queue last one first: heads of texts are what others share, "
        "so they are evicted last."
    ): "head first",
    (
        "The front of the queue is handed out, the block that was free longest; you hand out the one freed last."
    ): "most recent",
    (
        "A block that is handed out must forget its hash at once: its new owner overwrites what the hash promises."
    ): "hash stays",
    (
        "The hash was forgotten when the block became free; it is forgotten only when the block is handed out."
    ): "hash goes early",
    (
        "A block that nobody can find joins at the front of the queue: handing it out first loses nothing."
    ): "all to the end",
    (
        "A hit makes one more owner: raise ref_cnt, or the first owner to finish takes the block away from the other."
    ): "no owner on hit",
    (
        "A block that was hit has an owner and must leave the queue, from wherever it stands in it."
    ): "hit stays in the queue",
    "A hit ends at the first hash that is not known: keys and values behind a hole are of no use.": "over the hole",
    "The first block of a hash keeps it; a second copy stays unknown.": "second copy wins",
    (
        "One owner leaves, the others stay: free takes one from ref_cnt, "
        "and only the last owner's leaving frees the block."
    ): "one owner frees",
    "A block that has a hash already keeps it, whatever second hash it is given.": "two hashes",
    (
        "A block that is handed out has no hash any more: it can be cached anew, and is free without one."
    ): "half forgotten",
}
SERVE_MISTAKES = {
    (
        "The last token is always computed, and with it its block: a prompt that is cached as a whole still "
        "costs something."
    ): "full hit",
    (
        "Heads outlive tails: the last block of a prompt becomes the least recent of its blocks, "
        "the first one the most recent."
    ): "head first",
    "A block that is used again becomes the most recently used; yours keeps its old place.": "no touch",
    "The least recently used go; yours evicts the most recent.": "most recent",
    "The cache holds `capacity` blocks at most; yours goes on growing.": "no eviction",
    "Only full blocks are cached; yours keeps the one that is not full too.": "partial",
    "Whoever arrives after the clock is not there yet.": "not there yet",
    "Ties go to the earlier arrival, then to the smaller index.": "late ties",
    "Waiting counts: a prompt earns `ageing` for each unit of time that it has waited.": "no ageing",
    "What is cached counts: its tokens are added to what waiting has earned.": "only ageing",
}
