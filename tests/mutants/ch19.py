"""Mistakes that the checkers of chapter 19 must find, and what they must say."""

from minillm.book.proofs import Mutant, edited

MUTANTS = {
    "how_far": [
        edited(
            "the first valid, not the longest",
            "if state in may_end:\n            valid = count",
            "if state in may_end and valid < 0:\n            valid = count",
            "how_far: ",
        ),
        edited(
            "stops where it may end",
            "            valid = count\n",
            "            valid = count\n            break\n",
            "how_far: ",
        ),
        edited(
            "an empty language has an empty beginning",
            "    if 0 not in alive:\n        return -1, -1\n",
            "",
            "how_far: edges",
        ),
        Mutant(
            "empties the set that the answer depends on",
            source="def how_far(moves, may_end, text):\n    may_end.clear()\n    return -1, -1\n",
            expect="changed one of its arguments",
        ),
        edited(
            "says anything of a large automaton",
            "    sources = [[] for _ in moves]\n",
            "    sources = [[] for _ in moves]\n    if len(moves) > 9999:\n        return 0, 0\n",
            "valid is wrong",
        ),
        Mutant(
            "an object that is equal to everything",
            source="class Yes(int):\n    __eq__ = lambda *_: True\n    __hash__ = None\n\n\ndef how_far(moves, may_end, text):\n    return Yes(), Yes()\n",
            expect="a Yes, not an int",
        ),
        edited(
            "truth values for lengths",
            "    return valid, viable\n",
            "    return (valid == 1 or valid), (viable == 1 or viable)\n",
            "a bool, not an int",
        ),
    ],
    "token_lists": [
        Mutant(
            "empties the set of the ends and allows nothing",
            source="def token_lists(moves, may_end, vocabulary, end):\n    may_end.clear()\n    return [[] for _ in moves]\n",
            expect="changed one of its arguments",
        ),
        edited(
            "as many lists as states, when there are many",
            "    tokens = [(token",
            "    if len(moves) > 100:\n        return [[]] * len(moves)\n    tokens = [(token",
            "the list of lists is wrong at [0]",
        ),
        edited(
            "tuples for lists",
            "return [sorted(found + [end] * (state in may_end)) for",
            "return [tuple(sorted(found + [end] * (state in may_end))) for",
            "a tuple, not a list",
        ),
    ],
    "template": [
        Mutant(
            "a slot takes all it can",
            source="""
class Template:
    def __init__(self, parts):
        self.parts = [part.encode() if isinstance(part, str) else part for part in parts]

    def start(self):
        return (0, 0)

    def read(self, state, token):
        part, count = state
        for byte in token:
            while True:
                if part == len(self.parts):
                    return None
                here = self.parts[part]
                if isinstance(here, bytes):
                    if count < len(here) and here[count] == byte:
                        break
                    if count < len(here):
                        return None
                elif count < here.high and byte in here.allowed:
                    break
                elif count < here.low:
                    return None
                part, count = part + 1, 0
            count += 1
        return part, count

    def may_end(self, state):
        part, count = state
        while part < len(self.parts):
            here = self.parts[part]
            if count < (len(here) if isinstance(here, bytes) else here.low):
                return False
            part, count = part + 1, 0
        return True
""",
            expect="keeps both places",
        ),
        edited("forgets high", "return count < self.slots[part].high and byte", "return byte", "takes no more"),
        edited(
            "high is one less",
            "count < self.slots[part].high and",
            "(count + 1 < self.slots[part].high or count == 0) and",
            "template: ",
        ),
        edited("forgets low", "else [part]", "else [part._replace(low=0)]", "template: "),
        edited("leaves one part at a time", "                todo.append((part + 1, 0))\n", "", "template: edges"),
        edited(
            "an empty set is no None",
            "            if not state:\n                return None\n",
            "",
            "but read gave a state",
        ),
        edited("letters, not bytes", "part.encode()]", "part.encode('latin-1', 'replace')]", "template: edges"),
        Mutant(
            "changes the state",
            source="""
class Template:
    def __init__(self, parts):
        self.parts = [part.encode() if isinstance(part, str) else part for part in parts]

    def _settle(self, places):
        for part, here in enumerate(self.parts):
            least = len(here) if isinstance(here, bytes) else here.low
            if any(p == part and count >= least for p, count in places):
                places = places | {(part + 1, 0)}
        return places

    def _fits(self, part, count, byte):
        if part == len(self.parts):
            return False
        here = self.parts[part]
        if isinstance(here, bytes):
            return count < len(here) and here[count] == byte
        return count < here.high and byte in here.allowed

    def start(self):
        return [self._settle({(0, 0)})]

    def read(self, state, token):
        for byte in token:
            state[0] = self._settle({(p, count + 1) for p, count in state[0] if self._fits(p, count, byte)})
            if not state[0]:
                return None
        return state

    def may_end(self, state):
        return (len(self.parts), 0) in state[0]
""",
            expect="template: ",
        ),
        edited(
            "says yes to whatever is long",
            "        for byte in token:\n            state = self.settle(",
            "        if len(token) > 99:\n            return state\n        for byte in token:\n            state = self.settle(",
            "may_end after 300 bytes",
        ),
        edited(
            "an end that is equal to everything",
            "        return (len(self.slots), 0) in state\n",
            "        class Yes:\n            __eq__ = lambda *_: True\n        return Yes()\n",
            "a Yes, not a bool",
        ),
        Mutant(
            "one way after the other",
            source="""
class Template:
    def __init__(self, parts):
        self.parts = [part.encode() if isinstance(part, str) else part for part in parts]

    def start(self):
        return b""

    def _ways(self, text, part, whole):
        if part == len(self.parts):
            return not text
        here = self.parts[part]
        if isinstance(here, bytes):
            if not whole and len(text) <= len(here) and here.startswith(text):
                return True
            return text.startswith(here) and self._ways(text[len(here):], part + 1, whole)
        for count in range(min(here.high, len(text)) + 1):
            if count and text[count - 1] not in here.allowed:
                return False
            if not whole and count == len(text):
                return True
            if count >= here.low and self._ways(text[count:], part + 1, whole):
                return True
        return False

    def read(self, state, token):
        self._ways(state + token, 0, True)
        return state + token if self._ways(state + token, 0, False) else None

    def may_end(self, state):
        return self._ways(state, 0, True)
""",
            expect="Trying one division of the bytes after the other takes too long",
        ),
    ],
    "select_by_gain": [
        edited(
            "keys without the prompt",
            "if ids not in known:\n            known[ids] = logprobs_after(ids)\n        return known[ids]",
            "if ids[1:] not in known:\n            known[ids[1:]] = logprobs_after(ids)\n        return known[ids[1:]]",
            "select_by_gain: ",
        ),
        edited(
            "NumPy's floats",
            "    return max(range",
            "    import numpy\n    gains = [numpy.float64(gain) for gain in gains]\n    return max(range",
            "a float64, not a float",
        ),
    ],
    "jump": [
        edited("takes back nothing", "if len(said) - keep > most_back:", "if len(said) > keep:", "jump: "),
        edited(
            "one fewer may go back",
            "if len(said) - keep > most_back:",
            "if len(said) - keep >= most_back and keep < len(said):",
            "jump: ",
        ),
        edited(
            "a token from the last held-back place",
            "            ids = ids[:i]\n            break\n",
            "            ids = ids[:-1]\n            break\n",
            "jump: ",
        ),
        edited(
            "changes what was said",
            "keep, ids = len(said), said + encode(forced)",
            "keep = len(said)\n        said += encode(forced)\n        ids = said",
            "changed one of its arguments",
        ),
    ],
    "heal": [
        edited(
            "takes the tokens out of the prompt that it was given",
            "    kept = token_ids[: len(token_ids) - count]\n",
            '    kept = token_ids[: len(token_ids) - count]\n    token_ids = list(token_ids)\n    vocabulary[0] = vocabulary[0] + b""\n    vocabulary.append(b"")\n',
            "changed one of its arguments",
        ),
        edited(
            "the text instead of the tokens",
            "    return kept, allowed\n",
            "    return kept, [vocabulary[i] for i in allowed]\n",
            "the allowed tokens",
        ),
    ],
    "tell": [
        edited(
            "calls as a tuple", "told.append((text, calls))", "told.append((text, tuple(calls)))", "a tuple, not a list"
        ),
        edited(
            "one call a piece",
            "        while (at := held.find(begin)) >= 0:\n",
            "        while not calls and (at := held.find(begin)) >= 0:\n",
            "tell: ",
        ),
    ],
}
