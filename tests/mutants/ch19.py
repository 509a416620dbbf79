"""Mistakes that the checkers of chapter 19 must find, and what they must say."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "how_far": [
        Mutant(
            "forgets dead states",
            replace=("if state not in alive:\n            break", "if state is None:\n            break"),
            expect="is dead: a beginning that leads there is not viable",
        ),
        Mutant(
            "forgets the empty beginning",
            replace=("valid, viable, state = 0 if 0 in may_end else -1, 0, 0", "valid, viable, state = -1, 0, 0"),
            expect="The empty beginning counts too",
        ),
        Mutant(
            "the other way round",
            replace=("return valid, viable\n", "return viable, valid\n"),
            expect="First the valid length",
        ),
        Mutant(
            "the first valid, not the longest",
            replace=(
                "if state in may_end:\n            valid = count",
                "if state in may_end and valid < 0:\n            valid = count",
            ),
            expect="(valid, viable)",
        ),
        Mutant(
            "stops where it may end",
            replace=("            valid = count\n", "            valid = count\n            break\n"),
            expect="how_far: ",
        ),
        Mutant(
            "an empty language has an empty beginning",
            replace=("    if 0 not in alive:\n        return -1, -1\n", ""),
            expect="how_far: edges",
        ),
        Mutant(
            "a round for each state",
            source="""
def how_far(moves, may_end, text):
    alive, grown = set(may_end), True
    while grown:
        grown = False
        for state, row in enumerate(moves):
            if state not in alive and any(target in alive for target in row.values()):
                alive.add(state)
                grown = True
    if 0 not in alive:
        return -1, -1
    valid, viable, state = 0 if 0 in may_end else -1, 0, 0
    for count, byte in enumerate(text, 1):
        state = moves[state].get(byte)
        if state not in alive:
            break
        viable = count
        valid = count if state in may_end else valid
    return valid, viable
""",
            expect="took more than",
        ),
    ],
    "token_lists": [
        Mutant(
            "alive over bytes",
            source="""
def token_lists(moves, may_end, vocabulary, end):
    alive, grown = set(may_end), True
    while grown:
        more = {s for s, row in enumerate(moves) if s not in alive and alive & set(row.values())}
        alive |= more
        grown = bool(more)

    def walk(state, data):
        for byte in data:
            state = moves[state].get(byte)
            if state is None:
                return None
        return state

    return [[t for t, data in enumerate(vocabulary) if (s in may_end if t == end else data and walk(s, data) in alive)] for s in range(len(moves))]
""",
            expect="lead into a trap",
        ),
        Mutant(
            "all that can be walked",
            replace=("for token, target in found if target in alive", "for token, target in found"),
            expect="from which no end can be reached",
        ),
        Mutant("the end by its bytes", replace=("if data and token != end]", "if data]"), expect="token_lists: "),
        Mutant(
            "the end everywhere",
            replace=("[end] * (state in may_end)", "[end]"),
            expect="The end token is allowed where the text may end",
        ),
        Mutant(
            "the end last",
            replace=("sorted(found + [end] * (state in may_end))", "found + [end] * (state in may_end)"),
            expect="go upwards",
        ),
        Mutant(
            "tokens without bytes",
            replace=("if data and token != end]", "if token != end]"),
            expect="A token without bytes is never allowed",
        ),
        Mutant(
            "one token to the end",
            replace=("            alive.add(state)\n            queue.append(state)", "            alive.add(state)"),
            expect="token_lists: ",
        ),
        Mutant(
            "walks again in every round",
            source="""
def token_lists(moves, may_end, vocabulary, end):
    def walk(state, data):
        for byte in data:
            state = moves[state].get(byte)
            if state is None:
                return None
        return state

    alive, grown = set(may_end), True
    while grown:
        more = {s for s in range(len(moves)) if s not in alive
                and any([t != end and data and walk(s, data) in alive for t, data in enumerate(vocabulary)])}
        alive |= more
        grown = bool(more)
    return [[t for t, data in enumerate(vocabulary) if (s in may_end if t == end else data and walk(s, data) in alive)] for s in range(len(moves))]
""",
            expect="took more than",
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
        Mutant(
            "forgets high",
            replace=("return count < self.slots[part].high and byte", "return byte"),
            expect="mind `high`",
        ),
        Mutant(
            "high is one less",
            replace=("count < self.slots[part].high and", "(count + 1 < self.slots[part].high or count == 0) and"),
            expect="template: ",
        ),
        Mutant("forgets low", replace=("else [part]", "else [part._replace(low=0)]"), expect="template: "),
        Mutant(
            "leaves one part at a time",
            replace=("                todo.append((part + 1, 0))\n", ""),
            expect="template: edges",
        ),
        Mutant(
            "an empty set is no None",
            replace=("            if not state:\n                return None\n", ""),
            expect="but read gave a state",
        ),
        Mutant(
            "letters, not bytes",
            replace=("part.encode()]", "part.encode('latin-1', 'replace')]"),
            expect="template: edges",
        ),
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
            expect="Trying one way after the other never ends",
        ),
    ],
    "select_by_gain": [
        Mutant("asks again", replace=("if ids not in known:", "if True:"), expect="times after"),
        Mutant(
            "asks behind the end",
            replace=(
                "        asked, anyway = total(prompt, choice), total(neutral, choice)\n",
                "        asked, anyway = total(prompt, choice), total(neutral, choice)\n        after(prompt + choice)\n",
            ),
            expect="whose answer is not needed",
        ),
        Mutant("no neutral prompt", replace=("asked - anyway", "asked"), expect="select_by_gain: "),
        Mutant(
            "the mean of a token",
            replace=(
                'gains.append(asked if asked == -float("inf") else asked - anyway)',
                'gains.append((asked if asked == -float("inf") else asked - anyway) / len(choice))',
            ),
            expect="No division by the number of tokens",
        ),
        Mutant(
            "inf minus inf",
            replace=('asked if asked == -float("inf") else asked - anyway', "asked - anyway"),
            expect="is not a number",
        ),
        Mutant(
            "the last of equals",
            replace=(
                "max(range(len(gains)), key=gains.__getitem__)",
                "max(reversed(range(len(gains))), key=gains.__getitem__)",
            ),
            expect="ties go to the first",
        ),
        Mutant(
            "keys without the prompt",
            replace=(
                "if ids not in known:\n            known[ids] = logprobs_after(ids)\n        return known[ids]",
                "if ids[1:] not in known:\n            known[ids[1:]] = logprobs_after(ids)\n        return known[ids[1:]]",
            ),
            expect="select_by_gain: ",
        ),
        Mutant(
            "one token late",
            replace=("after(start + choice[:k])[token]", "after(start + choice[: k + 1])[token]"),
            expect="select_by_gain: ",
        ),
    ],
    "jump": [
        Mutant(
            "the last token only",
            replace=("for i in range(keep, len(ids)):", "for i in range(max(keep, len(ids) - 1), len(ids)):"),
            expect="Look at every new token",
        ),
        Mutant(
            "holds nothing back",
            replace=("            ids = ids[:i]\n            break\n", "            break\n"),
            expect="has to be held back",
        ),
        Mutant(
            "whatever may follow",
            replace=("if any(data[len(rest)] in may_follow for data in longer):", "if longer:"),
            expect="jump: ",
        ),
        Mutant(
            "takes back without limit",
            replace=("if len(said) - keep > most_back:", "if False:"),
            expect="are taken back",
        ),
        Mutant(
            "takes back nothing", replace=("if len(said) - keep > most_back:", "if len(said) > keep:"), expect="jump: "
        ),
        Mutant(
            "one fewer may go back",
            replace=("if len(said) - keep > most_back:", "if len(said) - keep >= most_back and keep < len(said):"),
            expect="jump: ",
        ),
        Mutant(
            "less than was said",
            replace=("    if len(text_of(ids)) < len(text_of(said)):\n        return len(said), []\n", ""),
            expect="spells less than what was said",
        ),
        Mutant(
            "a token from the last held-back place",
            replace=(
                "            ids = ids[:i]\n            break\n",
                "            ids = ids[:-1]\n            break\n",
            ),
            expect="jump: ",
        ),
        Mutant(
            "changes what was said",
            replace=(
                "keep, ids = len(said), said + encode(forced)",
                "keep = len(said)\n        said += encode(forced)\n        ids = said",
            ),
            expect="changed one of its arguments",
        ),
        Mutant(
            "cuts again and again",
            replace=(
                "    for i in range(keep, len(ids)):\n",
                "    for i in range(keep, len(ids)):\n        encode(forced)\n",
            ),
            expect="encode was called",
        ),
    ],
}
