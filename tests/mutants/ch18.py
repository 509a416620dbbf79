"""Mistakes that the checkers of chapter 18 must find, and what they must say."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "best_length": [
        edited(
            "forgets the target's own token",
            "best, tokens, chance = None, 1.0, 1.0",
            "best, tokens, chance = None, 0.0, 1.0",
            "best_length: ",
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
        edited(
            "as many tokens as were drafted",
            "step_ms(batch * (length + 1))",
            "step_ms(batch * max(1, length))",
            "best_length: ",
        ),
        edited(
            "one request's tokens in the step", "step_ms(batch * (length + 1))", "step_ms(length + 1)", "best_length: "
        ),
        edited("rounds the time", "    return best\n", "    return best[0], round(best[1], 6)\n", "ms_per_token"),
        edited(
            "rounds the time to nine places",
            "    return best\n",
            "    return best[0], round(best[1], 9)\n",
            "ms_per_token",
        ),
        edited("a time in float32", "    return best\n", "    return best[0], np.float32(best[1])\n", "ms_per_token"),
    ],
    "second_chance": [
        edited(
            "takes off the draft token only",
            "        gap = np.maximum(rest - qs[which], 0)\n",
            "        gap = rest.copy()\n        gap[token] = 0\n",
            "second_chance: ",
        ),
        edited(
            "accepts what the target likes better",
            "chances[which] * qs[which][token] < rest[token]",
            "qs[which][token] <= rest[token]",
            "second_chance: ",
        ),
        edited(
            "0 divided by 0",
            "        if gap.sum() > 0:\n            rest = gap / gap.sum()\n",
            "        with np.errstate(all='ignore'):\n            rest = gap / gap.sum()\n",
            "second_chance: edges",
        ),
        edited(
            "changes p",
            "    rest = p\n    for which",
            "    rest = p\n    p -= 0 * p\n    p[:] = p / (1 + 1e-9)\n    for which",
            "changed one of its arguments",
        ),
        edited("tells the token only", "return int(token), which", "return int(token)", "second_chance: "),
        edited(
            "a token of numpy",
            "return int(above[0] if len(above) else np.flatnonzero(rest)[-1]), None",
            "return (above[0] if len(above) else np.flatnonzero(rest)[-1]), None",
            "token",
        ),
        edited("little is nothing", "if gap.sum() > 0:", "if gap.sum() > 1e-12:", "second_chance: edges"),
        edited(
            "three draft tokens are enough",
            "for which, token in enumerate(drafted):",
            "for which, token in enumerate(drafted[:3]):",
            "second_chance: random",
        ),
        edited(
            "nothing left: all alike",
            "            rest = gap / gap.sum()\n",
            "            rest = gap / gap.sum()\n        else:\n            rest = np.full(len(p), 1 / len(p))\n",
            "second_chance: edges",
        ),
    ],
    "ngram_votes": [
        edited(
            "one guess only",
            "            guesses.append(guess)\n",
            "            guesses.append(guess)\n            break\n",
            "ngram_votes: ",
        ),
        edited(
            "the last place wins",
            "                self.votes[gram][token] += 1\n",
            "                self.votes[gram].clear()\n                self.votes[gram][token] += 1\n",
            "ngram_votes: ",
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
        edited(
            "at most three votes for a token",
            "                self.votes[gram][token] += 1\n",
            "                self.votes[gram][token] = min(3, self.votes[gram][token] + 1)\n",
            "ngram_votes: edges",
        ),
        edited(
            "forgets the beginning",
            "            self.text.append(token)\n",
            "            self.text.append(token)\n            if len(self.votes) > 3000:\n                self.votes.clear()\n",
            "the beginning of the draft after 6,000 tokens",
        ),
        edited(
            "keeps the caller's list",
            "        for token in token_ids:\n",
            "        if not self.text:\n            self.text, token_ids = token_ids, token_ids[:]\n            self.text.clear()\n        for token in token_ids:\n",
            "The list given to `extend` is the caller's",
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
        edited(
            "tokens of one byte",
            "        for token in token_ids:\n",
            "        for token in (one % 256 for one in token_ids):\n",
            "65836",
        ),
        edited(
            "no drafts for a long text",
            "        while len(guesses) < count:\n",
            "        while len(guesses) < count and (len(self.text) < 999 or count < 4):\n",
            "the beginning of the draft after 6,000 tokens",
        ),
        edited(
            "a draft of floats",
            "            guesses.append(guess)\n",
            "            guesses.append(float(guess))\n",
            "ngram_votes: ",
        ),
        edited("short n-grams pose as long ones", "if n <= len(tokens)]", "if tokens]", "ngram_votes: "),
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
        edited(
            "reads everything again", "self.slots[same] == token_ids[same]:", "False:", "slots hold what they should"
        ),
        edited(
            "reads the last guess too",
            "        self.slots = token_ids + guesses[:-1]\n",
            "        self.model.read(guesses[-1:], len(token_ids) + len(guesses) - 1)\n        self.slots = token_ids + guesses\n",
            "but not the last",
        ),
        edited(
            "takes the last guess for read",
            "self.slots = token_ids + guesses[:-1]",
            "self.slots = token_ids + guesses",
            "repair_drafter: example",
        ),
        edited(
            "trusts what a wrong guess left",
            "and self.slots[same] == token_ids[same]:",
            "and True:",
            "Which step should have read it?",
        ),
        edited(
            "reads although nothing is asked",
            "        if count == 0:\n            return []\n",
            "        if count == 0:\n            self.model.read(token_ids[-1:], len(token_ids) - 1)\n            return []\n",
            "A call with count=0 reads nothing",
        ),
        edited(
            "does not read the last token",
            "min(len(self.slots), len(token_ids) - 1)",
            "min(len(self.slots), len(token_ids))",
            "repair_drafter: ",
        ),
        edited(
            "looks into the model",
            "        same = 0\n",
            "        same, self.slots = 0, self.model.slots\n",
            "has no attribute 'slots'",
        ),
        edited(
            "keeps the caller's list",
            "        self.slots = token_ids + guesses[:-1]\n",
            "        self.slots = token_ids + guesses[:-1] if count > 1 else token_ids\n",
            "Which step should have read it?",
        ),
        edited(
            "trusts what lies behind a wrong token",
            "        self.slots = token_ids + guesses[:-1]\n",
            "        now = token_ids + guesses[:-1]\n        self.slots = now + self.slots[len(now) :]\n",
            "belong to another text",
        ),
        edited(
            "catches up one by one",
            "        guesses = [self.model.read(token_ids[same:], same)[-1]]\n",
            "        for place in range(same, len(token_ids)):\n            [guess] = self.model.read([token_ids[place]], place)\n        guesses = [guess]\n",
            "Everything that is missing is read in one call",
        ),
        edited("a tuple", "        return guesses\n", "        return tuple(guesses)\n", "must be a list"),
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
        edited("a mask of integers", "dtype=bool", "dtype=int", "mask"),
        edited(
            "sees the parent only",
            "mask[node, length:] = mask[parent, length:]",
            "mask[node, length + parent] = True",
            "verify_tree: ",
        ),
        edited(
            "adds the target's token to the path",
            "        if not found:\n",
            "        if not found:\n            path.append(at)\n",
            "path",
        ),
        edited(
            "positions of numpy",
            "positions.append(length + depths[node])",
            "positions.append(np.int64(length + depths[node]))",
            "positions",
        ),
        edited("tokens instead of indices", "        path.append(at)\n", "        path.append(tokens[at])\n", "path"),
    ],
    "by_position": [
        edited("a rate of 0 where no draft came", "if reached else None", "if reached else 0.0", "rates"),
        edited(
            "leaves out positions that no draft reached",
            "    for place in range(longest):\n",
            "    for place in range(max((a for _, a in traces), default=0)):\n",
            "rates",
        ),
        edited(
            "steps without a draft do not count",
            "accepted / len(traces)",
            "accepted / max(1, sum(length > 0 for length, _ in traces))",
            "tokens_per_step",
        ),
        edited(
            "the formula divides by zero",
            "sum(alpha**place for place in range(length + 1))",
            "(1 - alpha ** (length + 1)) / (1 - alpha)",
            "by_position: ",
        ),
    ],
}
