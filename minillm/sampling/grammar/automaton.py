"""Automata over bytes: a tree becomes an NFA, the NFA a DFA. Built in chapter 19.

    tree --Thompson 1968--> NFA --Rabin and Scott 1959--> DFA --Hopcroft 1971--> the smallest DFA

An NFA is easy to build, since its states may be joined by edges that read nothing; but it can be in many states at
once. A DFA is in one, so "which bytes may come next" is a row of a table. Both read bytes, not characters: tokens
are bytes, and may cut a character anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from minillm.sampling.grammar.characters import ByteRanges, Ranges, intersection, utf8_sequences
from minillm.sampling.grammar.regex import Chars, Either, Node, Repeat, Sequence

MAX_NFA_STATES = 50_000
MAX_DFA_STATES = 20_000
MAX_SUBSET_SIZE = 1_000_000  # of all subsets together: what bounds the time
NO_STATE = -1  # no text of the language begins so


class TooManyStates(ValueError):
    """A limit is passed; `way_out` is what its author can do about it."""

    def __init__(self, what: str, way_out: str):
        super().__init__(what)
        self.way_out = way_out


@dataclass(frozen=True)
class Automaton:
    """A DFA in which every state can still reach an accepting one. It starts in state 0.

    So a byte string is the beginning of a valid text if and only if it leads to a state.
    """

    table: np.ndarray  # int32 [num_states, 256]: the state after a byte, or NO_STATE
    accepting: np.ndarray  # bool [num_states]: the text may end here

    @property
    def num_states(self) -> int:
        return len(self.table)

    @cached_property
    def _cells(self) -> memoryview:
        """The table again: to read one cell this way takes a third of the time."""
        return memoryview(self.table)

    def walk(self, text: bytes, state: int = 0) -> int:
        """The state after `text`, or NO_STATE."""
        cells = self._cells
        for byte in text:
            if state == NO_STATE:
                break
            state = cells[state, byte]
        return state

    def matches(self, text: str) -> bool:
        state = self.walk(text.encode())
        return state != NO_STATE and bool(self.accepting[state])

    def forced_bytes(self, state: int) -> bytes:
        """What is sure to follow: as long as one byte leads on, and the text may not end."""
        found = bytearray()
        while not self.accepting[state]:  # ends, since an accepting state can be reached
            following = np.flatnonzero(self.table[state] != NO_STATE)
            if len(following) != 1:
                break
            found.append(following[0])
            state = int(self.table[state, following[0]])
        return bytes(found)


def build_automaton(tree: Node, characters: Ranges | None = None) -> Automaton:
    """The smallest DFA of the tree's texts, or of those that hold no other `characters`: a vocabulary may lack some.

    Raises ValueError if there is no such text, or if the DFA grows over the limits.
    """
    return minimize(*determinize(Nfa(tree, characters)))


class Nfa:
    """States are numbers; a state has edges that read a byte and jumps that read nothing. It starts in state 0."""

    def __init__(self, tree: Node, characters: Ranges | None = None):
        self.characters = characters
        self._sequences: dict[Ranges, tuple[ByteRanges, ...]] = {}  # what each set of characters is in bytes
        self.edges: list[list[tuple[int, int, int]]] = []  # of a state: (lowest byte, highest byte, target)
        self.jumps: list[list[int]] = []  # of a state: targets
        last = self.add(tree, self.new_state())
        self.end = self.new_state()  # one that leads nowhere
        self.jumps[last].append(self.end)

    def new_state(self) -> int:
        if len(self.edges) == MAX_NFA_STATES:
            what = f"it takes over {MAX_NFA_STATES} states to write down"
            raise TooManyStates(what, "nest fewer or smaller counted repetitions")
        self.edges.append([])
        self.jumps.append([])
        return len(self.edges) - 1

    def add(self, node: Node, start: int) -> int:
        """Add the paths that read `node` from state `start` on; return the state where they end (Thompson 1968)."""
        match node:
            case Chars(ranges):
                end = self.new_state()
                self._spell(self._in_bytes(ranges), start, {((),): end})
                return end
            case Sequence(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Either(options):
                end = self.new_state()
                for option in options:
                    self.jumps[start].append(entry := self.new_state())
                    self.jumps[self.add(option, entry)].append(end)
                return end
            case Repeat(part, low, high):
                for _ in range(low):
                    start = self.add(part, start)
                return self._loop(part, start) if high is None else self._optional(part, start, high - low)

    def _in_bytes(self, ranges: Ranges) -> tuple[ByteRanges, ...]:
        if ranges not in self._sequences:
            usable = ranges if self.characters is None else intersection(ranges, self.characters)
            self._sequences[ranges] = utf8_sequences(usable)
        return self._sequences[ranges]

    def _spell(self, sequences: tuple[ByteRanges, ...], state: int, tails: dict[tuple[ByteRanges, ...], int]) -> None:
        """Add the paths that read `sequences` from `state` on. Where the same rests follow, it is the same state."""
        for first, group in groupby(sequences, key=lambda sequence: sequence[0]):
            rests = tuple(sequence[1:] for sequence in group)
            if rests not in tails:
                tails[rests] = self.new_state()
                self._spell(rests, tails[rests], tails)
            self.edges[state].append((*first, tails[rests]))

    def _loop(self, part: Node, start: int) -> int:
        hub = self.new_state()
        self.jumps[start].append(hub)
        self.jumps[self.add(part, hub)].append(hub)
        return hub

    def _optional(self, part: Node, start: int, count: int) -> int:
        end = self.new_state()
        for _ in range(count):
            self.jumps[start].append(end)  # enough of it: leave
            start = self.add(part, start)
        self.jumps[start].append(end)
        return end

    def settle(self, states: set[int]) -> frozenset[int]:
        """Where one is in any of `states` without reading anything. States that only jump on are left out."""
        seen, todo = set(states), list(states)
        while todo:
            new = [target for target in self.jumps[todo.pop()] if target not in seen]
            seen.update(new)
            todo += new
        return frozenset(state for state in seen if self.edges[state] or not self.jumps[state])


def determinize(nfa: Nfa) -> tuple[list[dict[int, int]], list[bool], np.ndarray]:
    """Subset construction: a state of the DFA is the set of all states the NFA can be in (Rabin and Scott 1959).

    Returns for each state its moves {class of byte: state} and whether it accepts, and the class of each byte, int64
    [256]: bytes that no edge tells apart are one class, so that a row has a few entries and not 256.
    """
    ranges = {(low, high) for edges in nfa.edges for low, high, _ in edges}
    cuts = {cut for low, high in ranges for cut in (low, high + 1)}
    byte_class = np.searchsorted(sorted(cuts), np.arange(256), side="right")
    classes = {(low, high): range(byte_class[low], byte_class[high] + 1) for low, high in ranges}

    subsets = [nfa.settle({0})]
    numbers = {subsets[0]: 0}
    moves: list[dict[int, int]] = []
    total_size = 0
    for subset in subsets:  # grows while it is read
        reached: dict[int, set[int]] = defaultdict(set)
        for state in subset:
            for low, high, target in nfa.edges[state]:
                for byte in classes[low, high]:
                    reached[byte].add(target)
        moves.append({})
        for byte, states in reached.items():
            following = nfa.settle(states)
            total_size += len(following)
            if following not in numbers:
                numbers[following] = len(subsets)
                subsets.append(following)
            moves[-1][byte] = numbers[following]
        if len(subsets) > MAX_DFA_STATES or total_size > MAX_SUBSET_SIZE:
            raise TooManyStates(
                f"its automaton has over {MAX_DFA_STATES} states, or over {MAX_SUBSET_SIZE} states of the NFA in them",
                (
                    "shorten counted repetitions, above all one behind a part that may begin anywhere, "
                    "as in [ab]*a[ab]{20}"
                ),
            )
    return moves, [nfa.end in subset for subset in subsets], byte_class


def minimize(moves: list[dict[int, int]], accepting: list[bool], byte_class: np.ndarray) -> Automaton:
    """The DFA without states that lead to no end, and with those that the future cannot tell apart made one."""
    sources: list[dict[int, list[int]]] = [defaultdict(list) for _ in moves]  # of a state: {class of byte: states}
    for state, row in enumerate(moves):
        for byte, target in row.items():
            sources[target][byte].append(state)
    alive = _alive(sources, accepting)
    if 0 not in alive:
        raise ValueError(
            "it matches no text that can be written; a class in it is empty, "
            "or the vocabulary has no token for a character of it"
        )
    block_of = _blocks(sources, alive, accepting)

    order = {block_of[0]: 0}  # blocks as they are first met from the start on
    members = [0]
    rows = []
    for state in members:  # grows while it is read
        row = [NO_STATE] * (int(byte_class.max()) + 1)
        for byte, target in moves[state].items():
            if target in alive:
                if block_of[target] not in order:
                    order[block_of[target]] = len(order)
                    members.append(target)
                row[byte] = order[block_of[target]]
        rows.append(row)
    table = np.array(rows, dtype=np.int32)[:, byte_class]  # [num_states, 256]
    return Automaton(np.ascontiguousarray(table), np.array([accepting[state] for state in members]))


def _alive(sources: list[dict[int, list[int]]], accepting: list[bool]) -> set[int]:
    """The states from which an accepting one can be reached."""
    todo = [state for state, accepts in enumerate(accepting) if accepts]
    alive = set(todo)
    while todo:
        new = {source for states in sources[todo.pop()].values() for source in states} - alive
        alive |= new
        todo += new
    return alive


def _blocks(sources: list[dict[int, list[int]]], alive: set[int], accepting: list[bool]) -> dict[int, int]:
    """The number of each living state's block: two are in one block if the same texts lead both to an end.

    Hopcroft 1971: begin with accepting and not, and split a block where a byte leads some of it, but not all, into
    another block. After a split only the smaller part need be looked at again, so a state is moved log n times.
    """
    blocks = [{state for state in alive if accepting[state] is kind} for kind in (True, False)]
    block_of = {state: number for number, block in enumerate(blocks) for state in block}
    todo = [0, 1]
    while todo:
        arrivals: dict[int, set[int]] = defaultdict(set)  # {class of byte: the states it leads into this block}
        for state in blocks[todo.pop()]:
            for byte, states in sources[state].items():
                arrivals[byte].update(states)
        for states in arrivals.values():
            parts: dict[int, set[int]] = defaultdict(set)
            for state in states & alive:
                parts[block_of[state]].add(state)
            for number, part in parts.items():
                whole = blocks[number]
                if len(part) == len(whole):
                    continue
                whole -= part
                if len(part) > len(whole):
                    blocks[number], part = part, whole
                block_of |= dict.fromkeys(part, len(blocks))
                todo.append(len(blocks))
                blocks.append(part)
    return block_of
