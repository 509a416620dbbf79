"""A progress bar for `LLM.generate`: finished requests, and tokens a second. Built in chapter 04."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, use_tqdm: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar of finished requests with tokens a second, or nothing; gives a function (requests, tokens) that moves it."""
    if not use_tqdm:
        yield lambda requests, tokens: None
        return
    from tqdm.auto import tqdm

    num_tokens, start = 0, time.monotonic()
    with tqdm(total=total, desc="Requests", dynamic_ncols=True) as bar:

        def advance(requests: int, tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            bar.set_postfix_str(f"{num_tokens / (time.monotonic() - start):.0f} tokens/s", refresh=False)
            bar.update(requests)

        yield advance
        bar.refresh()
