"""Programs of prompts: a text that grows, now by what you write, now by what the model says. Built in chapter 19.

    state = State(llm, "Question: Is a cherry red or blue?\\nAnswer:")
    state += select("colour", [" red", " blue"])
    state += "\\nBecause"
    state += gen("reason", max_tokens=20, stop="\\n", temperature=0.0)
    print(state["colour"], state["reason"])

After SGLang's front end (Zheng et al. 2024, https://arxiv.org/abs/2312.07104), in plain Python. `+=` never waits: what
can be asked of the engine is asked at once, the rest as soon as the text before it is known. Reading a value runs
the engine until it is there, and all other states go on in the same batches. (Text as tokens: `engine.transcript`.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from minillm.engine.lock import FairLock, locked
from minillm.engine.lora_request import LoRARequest
from minillm.engine.outputs import RequestOutput
from minillm.engine.policies import cached_tokens_of
from minillm.engine.request import Request
from minillm.engine.sink import OutputSink
from minillm.engine.transcript import Transcript, kept_tokens
from minillm.sampling.params import SamplingParams, check_int
from minillm.sampling.selection import Selection, check_choices

if TYPE_CHECKING:
    from minillm.engine.llm import LLM

PREFILL = SamplingParams(temperature=0.0, max_tokens=1)
SCORE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)  # the one token that it samples is dropped


def gen(name: str, **fields: Any) -> Gen:
    """What the model says next, as `state[name]`; `fields` are those of `SamplingParams`."""
    params = SamplingParams(**fields)
    if params.n != 1:
        raise ValueError(f"gen({name!r}) takes n=1, not n={params.n}; fork the state for several samples")
    return Gen(name, params)


def select(name: str, choices: Sequence[str], normalize: bool = False) -> Select:
    """The most probable of `choices`, as `state[name]`: by the sum of its tokens' log-probabilities (how likely it is
    that the model goes on so), or by their mean, as in SGLang. `minillm.sampling.selection` says more."""
    check_choices(name, choices)
    return Select(name, tuple(choices), normalize)


class State:
    """A text and what it is to grow by. Begins with `text`, or with a conversation in the model's chat template.

    `state += "text"`, `state += gen(...)` and `state += select(...)` append. Use it in a `with` statement,
    or `close` it, where it may be left before it is done: what it asked of the engine is withdrawn then.
    """

    def __init__(self, llm: LLM, text: str | Sequence[dict[str, str]] = "", lora_request: LoRARequest | None = None):
        llm.engine.check_open()
        self.llm, self.lora_request = llm, lora_request  # the adapter that generates and scores, in branches too
        self._text = Transcript(llm.get_tokenizer(), special_tokens=isinstance(text, str))  # a template writes its own
        self._names: list[str] = []  # of values, there or to come
        self._num_inherited = 0  # the first of them are the parent's
        self._values: dict[str, tuple[Any, Any]] = {}  # name -> what `[name]` and `output(name)` are
        self._operations: deque[Iterator[Sequence[OutputSink | State]]] = deque()  # the first has begun
        self._awaited: Sequence[OutputSink | State] = ()  # what it waits for
        self._submissions: list[OutputSink] = []  # all that were asked for and have not ended
        self._branches: list[State] = []
        self._joining: State | None = None  # who waits for this branch to be done
        self._has_begun = True  # a branch begins when its parent comes to the fork
        self._sealed = ""  # why nothing may be appended any more
        self._error: BaseException | None = None
        self += text if isinstance(text, str) else llm.inputs.conversations([text])[0]

    def __iadd__(self, piece: str | Gen | Select) -> Self:
        does = {str: self._write, Gen: self._generate, Select: self._select}.get(type(piece))
        if does is None:
            raise TypeError(f"a state grows by a string, gen(...) or select(...), not by {piece!r}")
        self._append(does(piece), *[] if isinstance(piece, str) else [piece.name])
        return self

    def __getitem__(self, name: str) -> Any:
        """What was said under this name: a string, or after a join a list of them. Runs the engine until then."""
        return self._value(name)[0]

    def output(self, name: str) -> RequestOutput | Selection | list:
        """All that is known of `state[name]`: tokens, log-probabilities, times; or the scores of a select."""
        return self._value(name)[1]

    @property
    def text(self) -> str:
        """The whole text, when everything has been said."""
        self._wait(lambda: self.is_finished and self._error is None)
        return self._text.text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the whole text."""
        self._wait(lambda: self.is_finished and self._error is None)
        return self._text.tokens()

    @property
    def lock(self) -> FairLock:
        """The engine's: a step of another thread advances this state too."""
        return self.llm.lock

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self._has_begun and not self._operations

    @locked
    def fork(self, count: int) -> list[State]:
        """`count` states that go on from here, each its own way; this one may go on too. They share what the prefix
        cache holds of the text so far: it is computed once, before the first of them asks for anything."""
        check_int("count", count, 1)
        branches = [State(self.llm, lora_request=self.lora_request) for _ in range(count)]
        for branch in branches:
            branch._has_begun, branch._names, branch._num_inherited = False, list(self._names), len(self._names)
        self._branches += branches
        self._append(self._fork(branches))
        return branches

    @locked
    def join(self, branches: Sequence[State], separator: str | None = "\n") -> None:
        """Append what each of `branches` added since the fork, in their order, `separator` between two; None appends no
        text. `self[name]` becomes the list of what they called `name`. They may be read, but no longer appended to."""
        for index, branch in enumerate(branches):
            branch._check_open()
            if branch not in self._branches or branch in branches[:index]:
                raise ValueError(
                    f"branches[{index}] is not a branch of this state, or given twice; give what fork() returned"
                )
        names = dict.fromkeys(name for branch in branches for name in branch._names[branch._num_inherited :])
        self._append(self._join(list(branches), separator, list(names)), *names)
        for branch in branches:
            branch._sealed = "was joined"

    @locked
    def close(self) -> None:
        """Withdraw all that is under way, here and in the branches. What was said already may still be read."""
        for branch in self._branches:
            branch.close()
        self._sealed = self._sealed if self.is_finished and self._sealed else "was closed"
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _write(self, text: str) -> Iterator:
        self._text.write(text)
        yield ()

    def _generate(self, piece: Gen) -> Iterator:
        prompt = self._text.tokens()
        submission = self._submit(prompt, piece.params)
        yield [submission]
        output = submission.output()
        sample = output.outputs[0]
        if sample.error is not None:
            raise RuntimeError(sample.error)
        kept, rest = kept_tokens(self.llm.outputs.decode, prompt, sample, piece.params.begins_whole)
        self._text.say(sample.text, prompt + kept, rest)
        self._values[piece.name] = sample.text, output

    def _select(self, piece: Select) -> Iterator:
        """Scores begin where the first choice departs from the tokens of the text alone: at its end,
        or before a token of it that changes when a choice follows (" " and "red" may be one token together)."""
        before, texts = self._text.tokens(), [self._text.tokens(choice) for choice in piece.choices]
        start = len(list(takewhile(lambda column: len(set(column)) == 1, zip(before, *texts))))
        if not start:
            told = "needs a token before its choices that they leave as it is; write more"
            raise ValueError(f"select({piece.name!r}) {told}")
        yield from self._share(before[: start - 1], len(texts))  # the logits of token start - 1 are wanted
        submissions = [self._submit(text, SCORE, start) for text in texts]
        yield submissions
        rows = [submission.output().prompt_logprobs for submission in submissions]
        logprobs = [
            [row[token].logprob for token, row in zip(text[start:], found[start:])] for text, found in zip(texts, rows)
        ]
        selection = Selection(piece.choices, logprobs, piece.normalize)
        self._text.say(selection.choice, texts[selection.index])
        self._values[piece.name] = selection.choice, selection

    def _fork(self, branches: list[State]) -> Iterator:
        yield from self._share(self._text.tokens(), len(branches))
        for branch in branches:
            branch._text, branch._values = self._text.copy(), dict(self._values)
            branch._has_begun = True
            branch._advance()

    def _join(self, branches: list[State], separator: str | None, names: list[str]) -> Iterator:
        for branch in branches:
            branch._joining = self
        yield branches
        for branch in branches:
            if branch._error is not None:
                raise branch._error
            if branch._sealed == "was closed":
                raise RuntimeError("a branch was closed before it could be joined")
        if separator is not None:
            self._text.write(separator.join(branch._text.added for branch in branches))
        for name in names:
            found = [branch._values[name] for branch in branches if name in branch._values]
            self._values[name] = [value for value, _ in found], [output for _, output in found]
        self._branches = [one for one in self._branches if one not in branches]  # nothing of theirs is under way

    def _share(self, token_ids: list[int], count: int) -> Iterator:
        """Have the full blocks of `token_ids` computed, if `count` requests will begin with them: in one step each of
        those would compute them, since a step can share only what was there before it."""
        kv_cache = self.llm.engine.kv_cache
        whole = token_ids[: len(token_ids) // kv_cache.block_size * kv_cache.block_size]
        if count > 1 and whole and kv_cache.enable_prefix_caching and self._num_cached(whole) < len(whole):
            prefill = self._submit(whole, PREFILL)
            yield [prefill]
            prefill.output()

    def _num_cached(self, token_ids: list[int]) -> int:
        """How many of these tokens the prefix cache has."""
        kv_cache, [adapter] = self.llm.engine.kv_cache, self.llm.adapters.each(self.lora_request, 1)
        probe = Request("probe", [*token_ids, 0], SamplingParams(), max_tokens=1, adapter=adapter and adapter[1])
        found = cached_tokens_of(kv_cache)(probe)
        kv_cache.free(probe)
        return found

    def _submit(self, token_ids: list[int], params: SamplingParams, logprob_start_len: int = 0) -> OutputSink:
        if not token_ids:
            raise ValueError("there is no text to go on from; write some first: state += '...'")
        prompt = {"prompt_token_ids": token_ids, "logprob_start_len": logprob_start_len}
        sink = self.llm.submit(prompt, params, on_delta=self._advance, lora_request=self.lora_request)
        self._submissions = [*(one for one in self._submissions if not one.is_finished), sink]
        return sink

    @locked
    def _append(self, operation: Iterator, *names: str) -> None:
        self._check_open()
        for name in names:
            if not isinstance(name, str) or name in self._names:
                taken = ", ".join(self._names) or "nothing yet"
                raise ValueError(f"the name {name!r} is taken, or no string; taken: {taken}")
        self._names += names
        self._operations.append(operation)
        self._advance()

    def _advance(self, *_) -> None:
        """Go on as far as it goes without a step of the engine: an operation yields what it waits for."""
        while self._has_begun and self._operations and all(one.is_finished for one in self._awaited):
            try:
                self._awaited = next(self._operations[0])
            except StopIteration:
                self._awaited = ()
                self._operations.popleft()
            except Exception as error:  # raised where the value is read
                self._fail(error)
        if self.is_finished and self._joining is not None:
            joining, self._joining = self._joining, None
            joining._advance()

    def _value(self, name: str) -> tuple[Any, Any]:
        if name not in self._names:
            raise KeyError(f"nothing is called {name!r} here; there is: {', '.join(self._names) or 'nothing yet'}")
        self._wait(lambda: name in self._values)
        return self._values[name]

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not self._step_until(ready):
            pass

    @locked
    def _step_until(self, ready: Callable[[], bool]) -> bool:
        if ready():
            return True
        self._check_failed()
        if self.is_finished:
            raise RuntimeError(f"the state {self._sealed} before this was said")
        if not self.llm.engine.has_unfinished:
            raise RuntimeError("the engine knows nothing of what this state waits for: was it replaced?")
        self.llm.step()
        return False

    def _fail(self, error: BaseException) -> None:
        self._error = error
        for branch in self._branches:
            if not branch._has_begun:
                branch._fail(error)
        self._stop()

    def _stop(self) -> None:
        for submission in self._submissions:
            submission.withdraw()
        self._operations.clear()
        self._awaited, self._has_begun = (), True
        self._advance()  # what joins this has to know

    def _check_open(self) -> None:
        self._check_failed()
        if self._sealed:
            raise RuntimeError(
                f"the state {self._sealed} and takes nothing more; go on with the one that it was forked from"
            )

    def _check_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the program failed: {self._error}") from self._error


class Gen(NamedTuple):
    name: str
    params: SamplingParams


class Select(NamedTuple):
    name: str
    choices: tuple[str, ...]
    normalize: bool
