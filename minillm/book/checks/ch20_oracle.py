"""References for the exercises of chapter 20: slow, and written another way than a good answer. Built in chapter 20."""

from __future__ import annotations

from collections.abc import Sequence


def even_bounds(size: int, parts: int) -> list[int]:
    return [size * part // parts for part in range(parts + 1)]


def fewest_slots(requests: Sequence[tuple[int, int]], num_stages: int) -> int:
    """The least number of slots, by trying every order: breadth first over what is left and when it may go on."""
    states, slots = {tuple(sorted((chunks, tokens, 0) for chunks, tokens in requests))}, 0
    while not any(all(chunks + tokens == 0 for chunks, tokens, _ in state) for state in states):
        following = set()
        for state in states:
            aged = [(chunks, tokens, max(0, wait - 1)) for chunks, tokens, wait in state]
            ready = [place for place, (chunks, tokens, wait) in enumerate(state) if chunks + tokens and not wait]
            if not ready:
                following.add(tuple(sorted(aged)))
            for place in ready:  # to leave a slot empty while something is ready never helps
                chunks, tokens, _ = state[place]
                chunks, tokens = (chunks - 1, tokens) if chunks else (0, tokens - 1)
                wait = num_stages - 1 if tokens and not chunks else 0
                following.add(tuple(sorted([*aged[:place], *aged[place + 1 :], (chunks, tokens, wait)])))
        states, slots = following, slots + 1
    return slots
