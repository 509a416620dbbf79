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
            "as many tokens as were drafted",
            replace=("step_ms(batch * (length + 1))", "step_ms(batch * max(1, length))"),
            expect="best_length: ",
        ),
        Mutant(
            "one request's tokens in the step",
            replace=("step_ms(batch * (length + 1))", "step_ms(length + 1)"),
            expect="best_length: ",
        ),
        Mutant(
            "rounds the time",
            replace=("    return best\n", "    return best[0], round(best[1], 6)\n"),
            expect="ms_per_token",
        ),
        Mutant(
            "rounds the time to nine places",
            replace=("    return best\n", "    return best[0], round(best[1], 9)\n"),
            expect="ms_per_token",
        ),
        Mutant(
            "a time in float32",
            replace=("    return best\n", "    return best[0], np.float32(best[1])\n"),
            expect="ms_per_token",
        ),
    ],
    "second_chance": [
        Mutant(
            "takes off the draft token only",
            replace=(
                "        gap = np.maximum(rest - qs[which], 0)\n",
                "        gap = rest.copy()\n        gap[token] = 0\n",
            ),
            expect="second_chance: ",
        ),
        Mutant(
            "accepts what the target likes better",
            replace=("chances[which] * qs[which][token] < rest[token]", "qs[which][token] <= rest[token]"),
            expect="second_chance: ",
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
            replace=("return int(token), which", "return int(token)"),
            expect="second_chance: ",
        ),
        Mutant(
            "a token of numpy",
            replace=(
                "return int(above[0] if len(above) else np.flatnonzero(rest)[-1]), None",
                "return (above[0] if len(above) else np.flatnonzero(rest)[-1]), None",
            ),
            expect="token",
        ),
        Mutant(
            "little is nothing", replace=("if gap.sum() > 0:", "if gap.sum() > 1e-12:"), expect="second_chance: edges"
        ),
        Mutant(
            "three draft tokens are enough",
            replace=("for which, token in enumerate(drafted):", "for which, token in enumerate(drafted[:3]):"),
            expect="second_chance: random",
        ),
        Mutant(
            "nothing left: all alike",
            replace=(
                "            rest = gap / gap.sum()\n",
                "            rest = gap / gap.sum()\n        else:\n            rest = np.full(len(p), 1 / len(p))\n",
            ),
            expect="second_chance: edges",
        ),
    ],
    "ngram_votes": [
        Mutant(
            "one guess only",
            replace=("            guesses.append(guess)\n", "            guesses.append(guess)\n            break\n"),
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
        Mutant(
            "at most three votes for a token",
            replace=(
                "                self.votes[gram][token] += 1\n",
                "                self.votes[gram][token] = min(3, self.votes[gram][token] + 1)\n",
            ),
            expect="ngram_votes: edges",
        ),
        Mutant(
            "forgets the beginning",
            replace=(
                "            self.text.append(token)\n",
                "            self.text.append(token)\n            if len(self.votes) > 3000:\n                self.votes.pop(next(iter(self.votes)))\n",
            ),
            expect="the beginning of the draft after 6,000 tokens",
        ),
        Mutant(
            "keeps the caller's list",
            replace=(
                "        for token in token_ids:\n",
                "        if not self.text:\n            self.text, token_ids = token_ids, token_ids[:]\n            self.text.clear()\n        for token in token_ids:\n",
            ),
            expect="The list given to `extend` is the caller's",
        ),
        Mutant(
            "n-grams as text",
            source="""
class NgramVotes:
    def __init__(self, min_n, max_n):
        self.sizes, self.text, self.votes = range(max_n, min_n - 1, -1), [], defaultdict(Counter)

    def grams(self, tokens):
        return [(n, "".join(map(str, tokens[-n:]))) for n in self.sizes if n <= len(tokens)]

    def extend(self, token_ids):
        for token in token_ids:
            for gram in self.grams(self.text):
                self.votes[gram][token] += 1
            self.text.append(token)

    def propose(self, count):
        guesses, end = [], self.text[-self.sizes[0] :]
        while len(guesses) < count:
            known = next((gram for gram in self.grams(end + guesses) if gram in self.votes), None)
            if known is None:
                break
            token, most = self.votes[known].most_common(1)[0]
            if 2 * most <= self.votes[known].total():
                break
            guesses.append(token)
        return guesses
""",
            expect="[1, 12, 7, 11, 2]",
        ),
        Mutant(
            "tokens of one byte",
            replace=("        for token in token_ids:\n", "        for token in (one % 256 for one in token_ids):\n"),
            expect="65836",
        ),
        Mutant(
            "no drafts for a long text",
            replace=(
                "        while len(guesses) < count:\n",
                "        while len(guesses) < count and (len(self.text) < 999 or count < 4):\n",
            ),
            expect="the beginning of the draft after 6,000 tokens",
        ),
        Mutant(
            "a draft of floats",
            replace=("            guesses.append(guess)\n", "            guesses.append(float(guess))\n"),
            expect="ngram_votes: ",
        ),
        Mutant(
            "short n-grams pose as long ones", replace=("if n <= len(tokens)]", "if tokens]"), expect="ngram_votes: "
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
            "looks into the model",
            replace=("        same = 0\n", "        same, self.slots = 0, self.model.slots\n"),
            expect="has no attribute 'slots'",
        ),
        Mutant(
            "keeps the caller's list",
            replace=(
                "        self.slots = token_ids + guesses[:-1]\n",
                "        self.slots = token_ids + guesses[:-1] if count > 1 else token_ids\n",
            ),
            expect="Which step should have read it?",
        ),
        Mutant(
            "trusts what lies behind a wrong token",
            replace=(
                "        self.slots = token_ids + guesses[:-1]\n",
                "        now = token_ids + guesses[:-1]\n        self.slots = now + self.slots[len(now) :]\n",
            ),
            expect="belong to another text",
        ),
        Mutant(
            "catches up one by one",
            replace=(
                "        guesses = [self.model.read(token_ids[same:], same)[-1]]\n",
                "        for place in range(same, len(token_ids)):\n            [guess] = self.model.read([token_ids[place]], place)\n        guesses = [guess]\n",
            ),
            expect="Everything that is missing is read in one call",
        ),
        Mutant(
            "a tuple", replace=("        return guesses\n", "        return tuple(guesses)\n"), expect="must be a list"
        ),
        Mutant(
            "one memory for all drafters",
            source="""
class RepairedDrafter:
    slots = []

    def __init__(self, model):
        self.model = model

    def propose(self, token_ids, count):
        if count == 0:
            return []
        same, slots = 0, RepairedDrafter.slots
        while same < min(len(slots), len(token_ids) - 1) and slots[same] == token_ids[same]:
            same += 1
        guesses = [self.model.read(token_ids[same:], same)[-1]]
        while len(guesses) < count:
            guesses.append(self.model.read(guesses[-1:], len(token_ids) + len(guesses) - 1)[-1])
        RepairedDrafter.slots = token_ids + guesses[:-1]
        return guesses
""",
            expect="repair_drafter: ",
        ),
    ],
    "verify_tree": [
        Mutant(
            "a mask of integers",
            replace=("dtype=bool", "dtype=int"),
            expect="mask",
        ),
        Mutant(
            "sees the parent only",
            replace=("mask[node, length:] = mask[parent, length:]", "mask[node, length + parent] = True"),
            expect="verify_tree: ",
        ),
        Mutant(
            "adds the target's token to the path",
            replace=("        if not found:\n", "        if not found:\n            path.append(at)\n"),
            expect="path",
        ),
        Mutant(
            "positions of numpy",
            replace=("positions.append(length + depths[node])", "positions.append(np.int64(length + depths[node]))"),
            expect="positions",
        ),
        Mutant(
            "tokens instead of indices",
            replace=("        path.append(at)\n", "        path.append(tokens[at])\n"),
            expect="path",
        ),
    ],
    "by_position": [
        Mutant(
            "a rate of 0 where no draft came",
            replace=("if reached else None", "if reached else 0.0"),
            expect="rates",
        ),
        Mutant(
            "leaves out positions that no draft reached",
            replace=(
                "    for place in range(longest):\n",
                "    for place in range(max((a for _, a in traces), default=0)):\n",
            ),
            expect="rates",
        ),
        Mutant(
            "steps without a draft do not count",
            replace=("accepted / len(traces)", "accepted / max(1, sum(length > 0 for length, _ in traces))"),
            expect="tokens_per_step",
        ),
        Mutant(
            "the formula divides by zero",
            replace=("sum(alpha**place for place in range(length + 1))", "(1 - alpha ** (length + 1)) / (1 - alpha)"),
            expect="by_position: ",
        ),
    ],
}
