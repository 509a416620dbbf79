"""Checks of chapter 18: a lookup by votes, a draft cache kept in step. Built in chapter 18."""

from __future__ import annotations

from functools import partial

from minillm.book.checks import Case, Checker
from minillm.book.checks.ch18_oracle import (
    VOCABULARY,
    OnlyRead,
    ToyModel,
    Votes,
    honest_draft,
)
from minillm.book.checks.patience import within

_NGRAM = tuple(f"minillm.speculative.ngram.{name}" for name in ("NgramDrafter", "NgramIndex"))
check_ngram_votes = Checker(
    "ngram_votes",
    hint="A dictionary from each n-gram to the votes for what followed it; draft tokens do not vote.",
    misconceptions={
        "Where the longest n-gram with votes has no clear favourite, the draft ends.": partial(Votes, unsure="shorter"),
        "The longest n-gram that has votes decides, not the shortest.": partial(Votes, longest=False),
        "The favourite needs more than half of the votes.": partial(Votes, more_than=0.49999),
        "Draft tokens are not part of the text: they do not vote.": partial(Votes, guesses_vote=True),
        "Look up the text with the draft so far at its end.": partial(Votes, follows=False),
        "N-grams are counted across the borders of calls.": partial(Votes, borders=True),
    },
    forbid=_NGRAM,
)
check_repair_drafter = Checker(
    "repair_drafter",
    hint="Remember which token is in which KV slot, and read from the first one on that is wrong or empty.",
    forbid=("minillm.speculative.draft_model.DraftState", "minillm.speculative.draft_model.ModelDrafter"),
)


@check_ngram_votes.part("example")
def _votes_example(case: Case) -> None:
    _votes(case, 2, 3, [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 9, 1, 2]], 4)
    _votes(case, 1, 2, [[7, 8, 7, 8], [7, 8, 7]], 5)


@check_ngram_votes.part("edges")
def _votes_edges(case: Case) -> None:
    _votes(case, 1, 3, [], 4)  # no text at all
    _votes(case, 2, 4, [[5]], 4)
    _votes(case, 1, 1, [[5]], 4)  # nothing has followed it yet
    _votes(case, 1, 1, [[5, 5]], 3)
    _votes(case, 1, 2, [[1, 2, 1, 3, 1]], 4)  # half of the votes is not more than half
    _votes(case, 1, 2, [[1, 2, 1, 3, 1, 2, 1]], 1)
    _votes(case, 1, 3, [[9, 1, 2, 3, 8, 1, 2, 4, 7, 2, 3, 6, 2, 3, 1, 2]], 3)  # unsure at 2, sure at 1
    _votes(case, 1, 2, [[1], [2], [3], [], [1], [2]], 3)  # token by token
    _votes(case, 3, 3, [[1, 2, 3, 4, 5, 2, 3, 4, 1, 2, 3]], 6)
    _votes(case, 2, 2, [[1, 2, 3, 1, 2]], 0)
    _votes(case, 1, 4, [[6, 6, 6, 6, 6, 6]], 9)
    _votes(case, 1, 2, [[3, 1, 2, 3, 1, 4, 3, 1]], 5)
    _votes(case, 1, 1, [[1, 2] * 7 + [1, 3] * 4 + [1]], 1)  # seven votes against four
    _votes(case, 2, 2, [[1, 12, 7, 11, 2]], 1)  # (1, 12) is not (11, 2)
    _votes(case, 1, 1, [[300, 44, 65_836, 9, 50_256, 300]], 2)  # large token ids
    _callers_lists(case)
    student = case.run(case.student, 1, 2)
    case.run(student.extend, [1, 2, 3, 1, 2, 3, 1])
    first = [case.run(student.propose, 4) for _ in range(3)]
    case.equal(
        first,
        [[2, 3, 1, 2]] * 3,
        "three drafts of one text",
        hint="A draft changes nothing: draft tokens do not vote, and are no part of the text.",
    )


@check_ngram_votes.part("random")
def _votes_random(case: Case) -> None:
    for _ in range(40):
        words, min_n = case.rng.choice((2, 3, 6)), case.randint(1, 4)
        parts = [[case.randint(0, words) for _ in range(case.randint(0, 9))] for _ in range(case.randint(1, 6))]
        _votes(case, min_n, min_n + case.randint(0, 3), parts, case.randint(0, 7))
    text = [case.randint(0, 40) for _ in range(60_000)]
    known, drafts = [101, 102, 103, 104], []
    for place in (0, *range(5_998, 50_000, 6_000)):
        text[place : place + 4] = known
    student = case.run(case.student, 2, 4)
    with within(
        case,
        "60,000 tokens, added ten at a time, with a draft of 4 after each",
        "Keep counts while the text grows: a lookup must not walk through the text.",
    ):
        for start in range(0, len(text), 10):
            student.extend(text[start : start + 10])
            drafts.append(student.propose(4))
    for step in range(599, 5_000, 600):
        case.equal(drafts[step][:2], known[2:], f"the beginning of the draft after {10 * step + 10:,} tokens")
    case.run(student.extend, [101, 102])
    case.equal(
        case.run(student.propose, 2), [103, 104], "the draft after the tokens that the text of 60,000 began with"
    )


def _callers_lists(case: Case) -> None:
    """The lists given to extend are the caller's, who may change them afterwards."""
    student, first = case.run(case.student, 1, 2), [1, 2, 3]
    case.run(student.extend, first, lend=True)
    case.run(student.extend, [1], lend=True)
    hint = "The list given to `extend` is the caller's: append its tokens to a list of your own."
    case.equal(first, [1, 2, 3], "the list of an earlier call of extend", hint=hint)
    first[:] = [9, 9]
    case.equal(case.run(student.propose, 2), [2, 3], "the draft after the caller has changed its list", hint=hint)


def _votes(case: Case, min_n: int, max_n: int, parts: list[list[int]], count: int) -> None:
    student, oracle = case.run(case.student, min_n, max_n), Votes(min_n, max_n)
    for part in parts or [[]]:
        case.run(student.extend, list(part))
        oracle.extend(part)
        for ask in {count, 1}:
            told = f"the draft of at most {ask} after {oracle.text[-24:]}, min_n={min_n}, max_n={max_n}"
            case.equal(case.run(student.propose, ask), oracle.propose(ask), told)


@check_repair_drafter.part("example")
def _drafter_example(case: Case) -> None:
    _follows(case, [4, 8, 15, 16, 23], [(3, 3, 1), (3, 1, 1), (3, 3, 1), (3, 3, 1)])


@check_repair_drafter.part("edges")
def _drafter_edges(case: Case) -> None:
    _follows(case, [7], [(1, 1, 1), (1, 1, 1), (1, 0, 1), (1, 1, 1)])  # a text of one token
    _follows(case, [1, 2, 3], [(4, 0, 1)] * 4)  # nothing is ever right
    _follows(case, [1, 2, 3], [(4, 4, 1)] * 4)
    _follows(case, [1, 2, 3], [(2, 2, 1), (0, 0, 1), (0, 0, 1), (2, 1, 1), (2, 2, 1)])  # two steps without a draft
    _follows(case, [1, 2, 3], [(0, 0, 1), (0, 0, 1), (2, 1, 1), (5, 5, 1)])
    _follows(case, [5, 6], [(3, 2, 4), (3, 3, 6), (3, 3, 1)])  # more tokens come than one: forced by a grammar
    _follows(case, [5, 6], [(6, 3, 1), (1, 1, 1), (6, 6, 1), (2, 0, 1), (6, 5, 1)])  # drafts of other lengths
    # Not all draft tokens were verified, and they are right.
    _follows(case, [5, 6], [(6, 2, 1, 0), (6, 2, 1, 0), (2, 0, 1, 0), (0, 0, 1, 0), (3, 3, 1)])

    _behind_a_wrong_token(case)
    first, second = (case.run(case.student, OnlyRead(ToyModel()), may_change=True) for _ in range(2))
    for drafter, text in ((first, [1, 2, 3]), (second, [1, 2, 3, 4]), (first, [1, 2, 3, 9])):
        case.equal(
            case.run(drafter.propose, list(text), 2),
            honest_draft(text, 2),
            f"the draft after {text}, with two drafters that take turns,",
            hint="Two drafters share nothing: each has a model of its own.",
        )


@check_repair_drafter.part("random")
def _drafter_random(case: Case) -> None:
    for _ in range(30):
        text = [case.randint(0, VOCABULARY) for _ in range(case.randint(1, 12))]
        steps = []
        for _ in range(case.randint(1, 12)):
            count = case.randint(0, 6)
            steps.append(
                (
                    count,
                    case.rng.choice((count, case.randint(0, count + 1))),
                    case.rng.choice((1, 1, 1, 3)),
                    case.rng.choice((0, 1, 1)),
                )
            )
        _follows(case, text, steps)


def _behind_a_wrong_token(case: Case) -> None:
    """A rejected draft token leaves KV slots behind it that were computed after it."""
    model, text = ToyModel(), [1, 2, 3]
    student = case.run(case.student, OnlyRead(model), may_change=True)
    _, last, _ = case.run(student.propose, list(text), 3)
    text.append((honest_draft(text, 1)[0] + 1) % VOCABULARY)  # the target rejects all three
    case.run(student.propose, list(text), 1)
    text += [last, 0]  # now the text has, by chance, the token that KV slot 4 was left with
    model.reads.clear()
    case.run(student.propose, list(text), 1)
    case.equal(
        [start for start, _ in model.reads],
        [4],
        f"the list of KV slots at which the calls of read start, for the text {text},",
        hint=f"KV slot 4 holds {last}, which was read after a draft token that was rejected. Its keys and values "
        "belong to another text: read it again.",
    )


def _follows(case: Case, text: list[int], steps: list[tuple[int, ...]]) -> None:
    """Steps of (tokens asked for, of them accepted, tokens that the target adds[,
    how far these are from what the model says])."""
    model, text = ToyModel(), list(text)
    student = case.run(case.student, OnlyRead(model), may_change=True)
    known: list[int] = []  # what an attentive drafter has in its slots
    for number, (count, accepted, added, *off) in enumerate(steps, 1):
        model.reads.clear()
        got = case.run(student.propose, text, count, lend=True)  # one list, which grows
        right = honest_draft(text, count)
        told = f"in call {number}, for a text of {len(text)} tokens and count={count}"
        case.is_a(got, list, f"what propose returns {told}", of=int)
        case.equal(
            got,
            right,
            f"the draft {told}\n  the draft",
            hint=_what_lies_there(model, text, right),
        )
        same = next((i for i, (a, b) in enumerate(zip(known, text)) if a != b), min(len(known), len(text)))
        same = min(same, len(text) - 1)
        needed = (len(text) - same) + count - 1 if count else 0
        read = sum(len(tokens) for _, tokens in model.reads)
        case.true(
            read == needed,
            f"{read} tokens were read {told}; expected {needed}",
            hint=(
                "A call with count=0 reads nothing."
                if not count
                else (
                    f"The first {same} KV slots hold what they should: read only what comes after them, all at once, "
                    "and then one draft token after the other, but not the last."
                )
            ),
        )
        case.true(
            len(model.reads) == count,
            f"the model ran {len(model.reads)} times {told}; expected {count}",
            hint="Everything that is missing is read in one call, which also gives the first draft token.",
        )
        if count:
            known = [*text, *right[:-1]]
        text += right[:accepted]
        for _ in range(added):
            text.append((honest_draft(text, 1)[0] + (off[0] if off else accepted < count)) % VOCABULARY)


def _what_lies_there(model: ToyModel, text: list[int], right: list[int]) -> str | None:
    wanted = [*text, *right]
    for place, (found, token) in enumerate(zip(model.slots, wanted[: len(text)])):
        if found != token:
            return f"KV slot {place} holds {found}, and the text has {token} there. Which step should have read it?"
    return f"KV slot {len(model.slots)} was never written." if len(model.slots) < len(text) else None
