"""Mistakes that the checkers of chapter 18 must find, and what they must say."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "best_length": [
        Mutant(
            "forgets the target's own token",
            replace=("best, tokens, chance = None, 1.0, 1.0", "best, tokens, chance = None, 0.0, 1.0"),
            expect="best_length: ",
        ),
        Mutant(
            "adds the chances",
            replace=("            chance *= chances[length - 1]\n", "            chance = chances[length - 1]\n"),
            expect="multiply the chances up to it",
        ),
        Mutant(
            "one chance for all",
            source="""
def best_length(chances, draft_ms, step_ms, batch):
    alpha = sum(chances) / max(1, len(chances))
    times = []
    for length in range(len(chances) + 1):
        tokens = sum(alpha**i for i in range(length + 1))
        times.append((length * draft_ms + step_ms(batch * (length + 1))) / (batch * tokens))
    best = min(range(len(times)), key=lambda length: (round(times[length], 9), length))
    return best, times[best]
""",
            expect="best_length: ",
        ),
        Mutant(
            "the draft runs for every request",
            replace=("time = length * draft_ms +", "time = batch * length * draft_ms +"),
            expect="One pass of the draft serves the whole batch",
        ),
        Mutant(
            "the draft is free",
            replace=("time = length * draft_ms + step_ms", "time = step_ms"),
            expect="Drafting takes its time too",
        ),
        Mutant(
            "as many tokens as were drafted",
            replace=("step_ms(batch * (length + 1))", "step_ms(batch * max(1, length))"),
            expect="best_length: ",
        ),
        Mutant(
            "one request's tokens in the step",
            replace=("step_ms(batch * (length + 1))", "step_ms(length + 1)"),
            expect="Each of the requests brings its last token and its guesses",
        ),
        Mutant(
            "time of a request's token",
            replace=("ms = time / (batch * tokens)", "ms = time / tokens"),
            expect="best_length: ",
        ),
        Mutant(
            "ties to the longer",
            replace=("round(ms, 9) < round(best[1], 9)", "round(ms, 9) <= round(best[1], 9)"),
            expect="Of equally good lengths the shortest",
        ),
        Mutant(
            "stops at the first rise",
            replace=(
                "            best = (length, ms)\n",
                "            best = (length, ms)\n        else:\n            break\n",
            ),
            expect="every length must be tried",
        ),
        Mutant(
            "always drafts",
            replace=(
                "for length in range(len(chances) + 1):\n        if length:\n",
                "for length in range(min(1, len(chances)), len(chances) + 1):\n        if length:\n",
            ),
            expect="best_length: ",
        ),
        Mutant(
            "never drafts all",
            replace=("for length in range(len(chances) + 1):", "for length in range(max(1, len(chances))):"),
            expect="best_length: ",
        ),
    ],
    "second_chance": [
        Mutant(
            "draws from p in the end",
            replace=(
                "    above = np.flatnonzero(np.cumsum(rest) > last)",
                "    rest = p\n    above = np.flatnonzero(np.cumsum(rest) > last)",
            ),
            expect="not from p: the guesses have had their part",
        ),
        Mutant(
            "does not divide by the sum", replace=("rest = gap / gap.sum()", "rest = gap"), expect="second_chance: "
        ),
        Mutant(
            "divides only in the end",
            replace=(
                "            rest = gap / gap.sum()\n    above = np.flatnonzero(np.cumsum(rest) > last)",
                "            rest = gap\n    rest = rest / rest.sum()\n    above = np.flatnonzero(np.cumsum(rest) > last)",
            ),
            expect="divided by its sum, before the next guess is looked at",
        ),
        Mutant("compares with p", replace=("< rest[guess]:", "< p[guess]:"), expect="not with p"),
        Mutant(
            "takes off p each time",
            replace=("np.maximum(rest - qs[which], 0)", "np.maximum(p - qs[which], 0)"),
            expect="second_chance: ",
        ),
        Mutant(
            "the first q for all",
            replace=("np.maximum(rest - qs[which], 0)", "np.maximum(rest - qs[0], 0)"),
            expect="second_chance: ",
        ),
        Mutant(
            "takes off the guess only",
            replace=(
                "        gap = np.maximum(rest - qs[which], 0)\n",
                "        gap = rest.copy()\n        gap[guess] = 0\n",
            ),
            expect="second_chance: ",
        ),
        Mutant(
            "accepts on the border",
            replace=("* qs[which][guess] < rest[guess]", "* qs[which][guess] <= rest[guess]"),
            expect="exactly on the border is a rejection",
        ),
        Mutant(
            "accepts what the target likes better",
            replace=("chances[which] * qs[which][guess] < rest[guess]", "qs[which][guess] <= rest[guess]"),
            expect="second_chance: ",
        ),
        Mutant(
            "the running sum may be equal",
            replace=("np.cumsum(rest) > last)", "np.cumsum(rest) >= last)"),
            expect="larger than `last`, not equal to it",
        ),
        Mutant(
            "0 divided by 0",
            replace=(
                "        if gap.sum() > 0:\n            rest = gap / gap.sum()\n",
                "        with np.errstate(all='ignore'):\n            rest = gap / gap.sum()\n",
            ),
            expect="second_chance: edges",
        ),
        Mutant(
            "changes p",
            replace=(
                "    rest = p\n    for which",
                "    rest = p\n    p -= 0 * p\n    p[:] = p / (1 + 1e-9)\n    for which",
            ),
            expect="changed one of its arguments",
        ),
        Mutant(
            "tells the token only",
            replace=("return int(guess), which", "return int(guess)"),
            expect="not (token, which)",
        ),
        Mutant(
            "one guess is enough",
            replace=("for which, guess in enumerate(guesses):", "for which, guess in enumerate(guesses[:1]):"),
            expect="second_chance: ",
        ),
    ],
    "ngram_votes": [
        Mutant(
            "the shortest first",
            replace=("range(max_n, min_n - 1, -1), []", "range(min_n, max_n + 1), []"),
            expect="ngram_votes: ",
        ),
        Mutant(
            "asks a shorter one when unsure",
            replace=(
                "if gram in self.votes), None)",
                "if gram in self.votes and favourite_of(self.votes[gram]) is not None), None)",
            ),
            expect="a shorter one knows less",
        ),
        Mutant(
            "half is enough",
            replace=("if 2 * most > votes", "if 2 * most >= votes"),
            expect="more than half of the votes",
        ),
        Mutant("never silent", replace=("if 2 * most > votes.total()", "if most"), expect="ngram_votes: "),
        Mutant(
            "guesses vote",
            replace=(
                "            guesses.append(guess)\n",
                "            guesses.append(guess)\n            self.extend([guess])\n",
            ),
            expect="ngram_votes: ",
        ),
        Mutant(
            "one guess only",
            replace=("            guesses.append(guess)\n", "            guesses.append(guess)\n            break\n"),
            expect="look up the text with the guesses behind it",
        ),
        Mutant(
            "guesses are not looked up",
            replace=("ngrams_at_end(end + guesses,", "ngrams_at_end(end,"),
            expect="ngram_votes: ",
        ),
        Mutant(
            "the last place wins",
            replace=(
                "                self.votes[gram][token] += 1\n",
                "                self.votes[gram].clear()\n                self.votes[gram][token] += 1\n",
            ),
            expect="ngram_votes: ",
        ),
        Mutant(
            "forgets the border of a call",
            source="""
class NgramVotes:
    def __init__(self, min_n, max_n):
        from collections import Counter, defaultdict
        self.sizes, self.text, self.votes = range(max_n, min_n - 1, -1), [], defaultdict(Counter)

    def extend(self, token_ids):
        for place, token in enumerate(token_ids):
            for n in self.sizes:
                if n <= place:
                    self.votes[tuple(token_ids[place - n : place])][token] += 1
        self.text += token_ids

    def propose(self, count):
        end, guesses = self.text[-self.sizes[0] :], []
        while len(guesses) < count:
            known = next((tuple(end[-n:]) for n in self.sizes if n <= len(end) and tuple(end[-n:]) in self.votes), None)
            if known is None or 2 * self.votes[known].most_common(1)[0][1] <= self.votes[known].total():
                break
            guesses.append(self.votes[known].most_common(1)[0][0])
            end.append(guesses[-1])
        return guesses
""",
            expect="ngram_votes: edges",
        ),
        Mutant(
            "short n-grams pose as long ones", replace=("if n <= len(tokens)]", "if tokens]"), expect="ngram_votes: "
        ),
        Mutant(
            "walks through the text",
            source="""
class NgramVotes:
    def __init__(self, min_n, max_n):
        self.sizes, self.text = range(max_n, min_n - 1, -1), []

    def extend(self, token_ids):
        self.text += token_ids

    def propose(self, count):
        from collections import Counter
        text, guesses = list(self.text), []
        while len(guesses) < count:
            for n in self.sizes:
                votes = Counter(self.text[i + n] for i in range(len(self.text) - n) if self.text[i : i + n] == text[-n:]) if n <= len(text) else {}
                if votes:
                    break
            if not votes or 2 * votes.most_common(1)[0][1] <= votes.total():
                break
            guesses.append(votes.most_common(1)[0][0])
            text.append(guesses[-1])
        return guesses
""",
            expect="a lookup must not walk through the text",
        ),
    ],
    "repair_drafter": [
        Mutant(
            "the broken one",
            source="""
class RepairedDrafter:
    def __init__(self, model):
        self.model, self.started = model, False

    def propose(self, token_ids, count):
        if not self.started:
            self.started = True
            if token_ids[:-1]:
                self.model.read(token_ids[:-1], 0)
        guesses, token, place = [], token_ids[-1], len(token_ids) - 1
        for _ in range(count):
            [token] = self.model.read([token], place)
            guesses.append(token)
            place += 1
        return guesses
""",
            expect="repair_drafter: example",
        ),
        Mutant(
            "always the last two",
            source="""
class RepairedDrafter:
    def __init__(self, model):
        self.model, self.started = model, False

    def propose(self, token_ids, count):
        if count == 0:
            return []
        start = max(0, len(token_ids) - 2) if self.started else 0
        self.started = True
        guesses = [self.model.read(token_ids[start:], start)[-1]]
        while len(guesses) < count:
            guesses.append(self.model.read(guesses[-1:], len(token_ids) + len(guesses) - 1)[-1])
        return guesses
""",
            expect="slots hold what they should",
        ),
        Mutant(
            "reads everything again",
            replace=("self.slots[same] == token_ids[same]:", "False:"),
            expect="slots hold what they should",
        ),
        Mutant(
            "reads the last guess too",
            replace=(
                "        self.slots = token_ids + guesses[:-1]\n",
                "        self.model.read(guesses[-1:], len(token_ids) + len(guesses) - 1)\n        self.slots = token_ids + guesses\n",
            ),
            expect="but not the last",
        ),
        Mutant(
            "takes the last guess for read",
            replace=("self.slots = token_ids + guesses[:-1]", "self.slots = token_ids + guesses"),
            expect="repair_drafter: example",
        ),
        Mutant(
            "trusts what a wrong guess left",
            replace=("and self.slots[same] == token_ids[same]:", "and True:"),
            expect="Which step should have read it?",
        ),
        Mutant(
            "reads although nothing is asked",
            replace=(
                "        if count == 0:\n            return []\n",
                "        if count == 0:\n            self.model.read(token_ids[-1:], len(token_ids) - 1)\n            return []\n",
            ),
            expect="A call with count=0 reads nothing",
        ),
        Mutant(
            "does not read the last token",
            replace=("min(len(self.slots), len(token_ids) - 1)", "min(len(self.slots), len(token_ids))"),
            expect="repair_drafter: ",
        ),
        Mutant(
            "catches up one by one",
            replace=(
                "        guesses = [self.model.read(token_ids[same:], same)[-1]]\n",
                "        for place in range(same, len(token_ids)):\n            [guess] = self.model.read([token_ids[place]], place)\n        guesses = [guess]\n",
            ),
            expect="Everything that is missing is read in one call",
        ),
    ],
}
