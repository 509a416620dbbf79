"""vLLM's `Scheduler.schedule`, stretch by stretch: which chapter explains it, and what no chapter does.
Built in chapter 25."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from minillm.book.reading.guide import SCHEDULER as FILE
from minillm.book.reading.index import load

METHOD = f"{FILE}::Scheduler.schedule"
NEW = 0  # no chapter before this one explains it

# fmt: off
# First line, chapter, what the lines do; a stretch ends where the next one begins. Lines of the indexed commit.
_STARTS = [
    (591, 5, "the rule, and the lists of a step"),
    (612, 18, "room for draft tokens"),
    (614, 8, "the budget"),
    (619, 25, "the encoder's budget"),
    (622, 18, "the draft tokens of the step"),
    (624, 5, "what is noted of the batch"),
    (634, NEW, "data-parallel ranks prefill in the same steps"),
    (640, 8, "a cap on one long prompt"),
    (657, 5, "running requests, in order"),
    (664, 14, "its last token is in flight already"),
    (680, NEW, "a pause between two decodes, for pipeline stages"),
    (686, NEW, "data-parallel ranks prefill in the same steps"),
    (692, NEW, "images that another server encodes"),
    (703, 5, "the tokens that are missing"),
    (708, 8, "cut to the cap and to the budget"),
    (714, 18, "no draft beyond the longest text"),
    (723, NEW, "blocks of recurrent states (Mamba)"),
    (729, 25, "images of this chunk"),
    (749, NEW, "prediction modules that look ahead"),
    (755, 5, "nothing to do for it"),
    (775, 6, "blocks for its tokens"),
    (788, 22, "blocks that are being sent away"),
    (794, 9, "who is preempted"),
    (804, 22, "blocks that are being sent away"),
    (808, 9, "a victim that has its tokens already"),
    (822, 25, "images of the victim"),
    (833, 6, "preempt, and try again"),
    (850, 5, "it is scheduled"),
    (860, 18, "its draft tokens"),
    (878, 25, "its images"),
    (889, 23, "adapters of the batch"),
    (899, 5, "waiting requests, if nothing was preempted"),
    (904, 19, "a request that cannot start yet is set aside"),
    (912, 5, "while there is budget and a place"),
    (929, 19, "its grammar is being compiled"),
    (934, 14, "tokens in flight from before it was preempted"),
    (941, 23, "no more adapters than fit"),
    (954, 22, "keys and values from elsewhere"),
    (959, 7, "the longest cached prefix"),
    (969, 22, "a longer prefix from elsewhere"),
    (993, NEW, "the window is replayed"),
    (1007, 22, "the longer one of the two"),
    (1029, NEW, "blocks of recurrent states (Mamba)"),
    (1039, 22, "hits are counted"),
    (1044, 7, "tokens that need not be computed"),
    (1049, NEW, "the window is replayed"),
    (1069, NEW, "images that another server encodes"),
    (1074, 7, "hits of the first prefill"),
    (1082, 22, "keys and values that have arrived"),
    (1094, NEW, "images that another server encodes"),
    (1098, 25, "images of this chunk"),
    (1104, NEW, "the window is replayed"),
    (1109, 22, "loading: nothing to compute yet"),
    (1113, NEW, "data-parallel ranks prefill in the same steps"),
    (1117, 8, "the budget"),
    (1119, NEW, "the window is replayed"),
    (1125, 5, "the tokens that are missing"),
    (1131, 18, "padded to the drafts' length"),
    (1155, 8, "cut to the cap and to the budget"),
    (1172, NEW, "blocks of recurrent states (Mamba)"),
    (1195, 25, "images of this chunk"),
    (1211, NEW, "prediction modules that look ahead"),
    (1217, 5, "nothing to do for it"),
    (1221, 18, "room for draft tokens"),
    (1229, NEW, "encoder and decoder in one model"),
    (1241, 22, "blocks kept for requests that load"),
    (1253, NEW, "the window is replayed"),
    (1256, 6, "blocks for its tokens"),
    (1278, 25, "images of a request that has to wait"),
    (1282, 6, "it has to wait"),
    (1284, 22, "keys and values from elsewhere"),
    (1314, 7, "hits are counted"),
    (1320, 22, "it waits for keys and values"),
    (1343, 5, "it runs"),
    (1360, 23, "adapters of the batch"),
    (1362, 5, "it is scheduled"),
    (1370, 22, "keys and values have arrived"),
    (1371, 18, "padded to the drafts' length"),
    (1376, 5, "it is scheduled"),
    (1379, 25, "its images"),
    (1391, 5, "what was set aside goes back"),
    (1397, NEW, "data-parallel ranks prefill in the same steps"),
    (1403, 5, "nothing was given away twice"),
    (1417, 5, "the step as plain data"),
    (1454, NEW, "blocks of recurrent states (Mamba)"),
    (1459, 22, "blocks that may be sent"),
    (1474, 6, "blocks to copy"),
    (1485, 18, "as many drafts as pay"),
    (1492, 25, "images are counted"),
    (1501, 5, "the step as plain data"),
    (1524, 22, "what the workers load and save"),
    (1532, NEW, "other outputs of a layer"),
    (1539, NEW, "images that another server encodes"),
    (1546, 22, "what the workers load and save"),
    (1549, 14, "steps in flight are numbered"),
    (1554, 14, "computed, before it is"),
]
# fmt: on


@dataclass(frozen=True)
class Stretch:
    """Some lines of the method. `code` of them hold code; `chapter` explains them, 0 where none does."""

    first: int
    last: int
    code: int
    chapter: int
    what: str


def stretches() -> list[Stretch]:
    """All of the method, in order. Raises ValueError if the lines do not fit the index, as after another commit."""
    index = load("vllm")
    first, last = index.find(METHOD)
    starts = [line for line, _, _ in _STARTS]
    if starts[0] != first or sorted(set(starts)) != starts or starts[-1] > last:
        raise ValueError(f"{METHOD} is on lines {first} to {last}; the reading begins on line {starts[0]}")
    ends = [*(line - 1 for line in starts[1:]), last]
    return [Stretch(line, end, index.code_between(FILE, line, end), chapter, what)
            for (line, chapter, what), end in zip(_STARTS, ends)]  # fmt: skip


def lines_by_chapter() -> Counter[int]:
    """Chapter -> lines of code of the method that it explains."""
    found: Counter[int] = Counter()
    for stretch in stretches():
        found[stretch.chapter] += stretch.code
    return found
