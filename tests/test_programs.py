"""Programs of prompts: what they say is what the engine says, what they share is counted, what they leave is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import BEGIN, save_tiny_llama

from minillm import LLM, SamplingParams
from minillm.programs import State, gen, select
from minillm.sampling.selection import Selection

TEXT = "the cat sat on the mat, then the naïve cat ate 10 crêpes"
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny-llama")


@pytest.fixture(scope="module")
def oracle(folder):
    return save_tiny_llama(folder)


@pytest.fixture
def llm(folder, oracle) -> LLM:
    return make_llm(folder)


def make_llm(folder: Path | str, **settings) -> LLM:
    llm = LLM(str(folder), **{"device": "cpu", "block_size": BLOCK, "num_kv_blocks": 500} | settings)
    llm.trace.enabled = True
    return llm


def say(llm: LLM, prompt, **params):
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def rows_of(llm: LLM) -> list[int]:
    """How many rows each step had."""
    steps = [event.step for event in llm.trace.events if event.name == "tokens"]
    return [steps.count(step) for step in sorted(set(steps))]


def prefill_of(llm: LLM) -> int:
    """How many tokens of prompts were computed."""
    rows = [(event.args["start"], event.value, event.args["prompt"]) for event in llm.trace.events if event.name == "tokens"]
    return int(sum(max(0, min(start + count, prompt) - start) for start, count, prompt in rows))


def is_clean(llm: LLM) -> bool:
    llm.engine.scheduler.check_integrity()
    left = (llm.engine.has_unfinished, llm._collectors, llm._submissions, llm.engine.kv_cache.tables, llm.engine.kv_cache.chains)
    return not any(left)


@pytest.mark.parametrize("params", [dict(temperature=0.0, max_tokens=9), dict(seed=3, top_k=20, max_tokens=7), dict(temperature=0.0, stop="a", max_tokens=30)])
def test_gen_says_what_generate_says(llm, params):
    state = State(llm, TEXT)
    state += gen("answer", ignore_eos=True, **params)
    expected = say(llm, TEXT, ignore_eos=True, **params)
    assert state["answer"] == expected.text and state.text == TEXT + expected.text
    assert state.output("answer").outputs[0].token_ids == expected.token_ids
    assert gen("x", min_p=0.5, stop=["a"]).params == SamplingParams(min_p=0.5, stop=["a"])
    assert is_clean(llm)


def test_what_was_said_keeps_its_tokens_and_is_found_in_the_cache(llm):
    state = State(llm, TEXT)
    state += gen("one", temperature=1.3, seed=1, max_tokens=13, ignore_eos=True)
    state += " and "
    state += gen("two", temperature=0.0, max_tokens=3, ignore_eos=True)
    tokenizer = llm.get_tokenizer()
    [first] = state.output("one").outputs
    second = state.output("two")
    known = tokenizer.encode(TEXT) + first.token_ids
    assert len(first.token_ids) == 13
    assert tokenizer.encode(tokenizer.decode(known)[len(BEGIN) :]) != known  # random tokens: tokenized anew they would be others
    assert second.prompt_token_ids == known + tokenizer.encode(" and ", add_special_tokens=False)
    assert second.metrics.num_cached_tokens == (len(known) - 1) // BLOCK * BLOCK  # all that was computed, in full blocks
    assert state.token_ids == second.prompt_token_ids + second.outputs[0].token_ids


def test_a_token_that_ends_the_text_is_no_part_of_it(tmp_path):
    save_tiny_llama(tmp_path, eos_token_id=list(range(1, 300, 2)))
    llm = make_llm(tmp_path)
    state = State(llm, TEXT)
    state += gen("one", temperature=1.5, seed=5, max_tokens=50)
    [sample] = state.output("one").outputs
    assert sample.finish_reason == "stop" and len(sample.token_ids) > 1
    assert state.token_ids == llm.get_tokenizer().encode(TEXT) + sample.token_ids[:-1]


def test_a_stop_string_that_cuts_through_a_token_leaves_what_was_before_it(llm):
    state = State(llm, TEXT)
    # The bias makes the model say "the cat" for ever: one token " cat" of the tokenizer holds the stop string "at".
    tokenizer = llm.get_tokenizer()
    cut = tokenizer.encode(" cat", add_special_tokens=False)
    assert len(cut) == 1
    state += gen("one", temperature=0.0, max_tokens=5, logit_bias={cut[0]: 100}, stop="at")
    state += "row"
    assert (state["one"], state.text) == (" c", TEXT + " crow")
    assert state.token_ids == tokenizer.encode(TEXT) + tokenizer.encode(" crow", add_special_tokens=False)
    whole = State(llm, TEXT)
    whole += gen("one", temperature=0.0, max_tokens=3, logit_bias={cut[0]: 100}, stop=" cat cat cat")
    assert (whole["one"], whole.token_ids) == ("", tokenizer.encode(TEXT))
    exact = State(llm, TEXT)
    exact += gen("one", temperature=0.0, max_tokens=9, min_tokens=4, logit_bias={cut[0]: 100}, stop=" cat")
    assert exact["one"] == " cat" * 3 and exact.token_ids == tokenizer.encode(TEXT) + cut * 3


def test_written_text_is_tokenized_as_one_piece_however_it_was_cut(llm):
    expected = llm.get_tokenizer().encode(TEXT)
    state = State(llm)
    for character in TEXT[:20]:
        state += character
    [branch, _] = state.fork(2)
    branch += TEXT[20:]
    assert branch.token_ids == expected
    assert sum((llm.get_tokenizer().encode(c, add_special_tokens=False) for c in TEXT), expected[:1]) != expected
    conversation = State(llm, [{"role": "user", "content": "the cat"}])
    conversation += gen("answer", temperature=0.0, max_tokens=4)
    [expected] = llm.chat([{"role": "user", "content": "the cat"}], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert conversation.output("answer").prompt_token_ids == expected.prompt_token_ids
    assert conversation["answer"] == expected.outputs[0].text


def reference(oracle, tokens: list[int], start: int) -> list[float]:
    """Log-probabilities of tokens[start:] by transformers."""
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)  # [num_tokens, vocab_size]
    return [logprobs[at - 1, tokens[at]].item() for at in range(start, len(tokens))]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("text, choices, num_shared", [
    (TEXT, [" the mat", " 日本語", "😀"], None),
    (TEXT + " the c", ["at", "rêpes", "10"], -1),  # " c" and "at" are one token together: scores begin before " c"
])  # fmt: skip
def test_the_scores_of_a_select_are_transformers_logprobs(llm, oracle, normalize, text, choices, num_shared):
    encode = llm.get_tokenizer().encode
    start = len(encode(text)) + (num_shared or 0)
    assert all(encode(text + choice)[:start] == encode(text)[:start] for choice in choices)
    state = State(llm, text)
    state += select("choice", choices, normalize)
    found = state.output("choice")
    expected = [reference(oracle, encode(text + choice), start) for choice in choices]
    for row, other in zip(found.logprobs, expected, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    scores = [sum(row) / (len(row) if normalize else 1) for row in expected]
    assert found.scores == pytest.approx(scores, abs=1e-4)
    best = choices[scores.index(max(scores))]
    assert state["choice"] == best and state.text == text + best and state.token_ids == encode(text + best)
    assert is_clean(llm)


def test_choices_are_scored_in_one_batch_that_shares_the_text_before(llm):
    state = State(llm, TEXT)
    state += select("choice", [" the mat", " 日本語", "😀"])
    assert state["choice"]
    num_before = len(llm.get_tokenizer().encode(TEXT))
    whole = (num_before - 1) // BLOCK * BLOCK  # the last token before the choices has to be computed: its logits are wanted
    sizes = [len(row) for row in state.output("choice").logprobs]
    assert rows_of(llm) == [1, 3]
    assert prefill_of(llm) == whole + sum(num_before - whole + size for size in sizes)
    llm.trace.clear()
    again = State(llm, TEXT)
    again += select("choice", [" the mat", " 日本語", "😀"])
    assert again["choice"] == state["choice"] and rows_of(llm) == [3]  # nothing to compute before


def test_which_choice_wins_by_sum_and_by_mean():
    logprobs = [[-1.2], [-1.6, -0.2, -0.1], [-1.2]]
    assert Selection("abc", logprobs).choice == "a" and Selection("abc", logprobs, normalize=True).choice == "b"


def scored(llm: LLM, tokens: list[int], start: int, params: SamplingParams) -> list:
    prompt = {"prompt_token_ids": tokens, "logprob_start_len": start}
    return llm.generate(prompt, params, use_tqdm=False)[0]


@pytest.mark.parametrize("chunk", [100, 5])
@pytest.mark.parametrize("start", [0, 1, 4, 5, 9, 18])
def test_prompt_logprobs_from_a_position_on_are_those_of_all(folder, oracle, start, chunk):
    llm = make_llm(folder, max_num_batched_tokens=chunk)
    tokens = list(range(10, 29))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    for expect_cached in (0, max(0, start - 1) // BLOCK * BLOCK):
        output = scored(llm, tokens, start, params)
        assert output.metrics.num_cached_tokens == expect_cached
        assert output.prompt_logprobs[: max(1, start)] == [None] * max(1, start) and len(output.prompt_logprobs) == 19
        found = [row[token].logprob for token, row in zip(tokens[max(1, start) :], output.prompt_logprobs[max(1, start) :])]
        assert found == pytest.approx(reference(oracle, tokens, max(1, start)), abs=1e-4)
        assert all(len(row) in (2, 3) for row in output.prompt_logprobs[max(1, start) :])
    assert output.outputs[0].token_ids == say(llm, {"prompt_token_ids": tokens}, temperature=0.0, max_tokens=3, ignore_eos=True).token_ids


@pytest.mark.parametrize("settings", [{}, {"preemption_mode": "swap", "host_kv_bytes": 1 << 20}])
def test_prompt_logprobs_from_a_position_on_survive_preemption_and_samples(folder, oracle, settings):
    llm = make_llm(folder, num_kv_blocks=16, max_num_batched_tokens=7, **settings)
    texts = [[5 + i, *range(10, 28)] for i in range(3)]
    say(llm, {"prompt_token_ids": texts[0]}, max_tokens=1)
    params = SamplingParams(seed=0, max_tokens=20, ignore_eos=True, prompt_logprobs=0, n=2)
    prompts = [{"prompt_token_ids": text, "logprob_start_len": 10 + i} for i, text in enumerate(texts)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0 and outputs[0].metrics.num_cached_tokens == 8
    for i, (text, output) in enumerate(zip(texts, outputs)):
        rows = output.prompt_logprobs
        assert rows[: 10 + i] == [None] * (10 + i) and len(rows) == len(text)
        found = [rows[at][text[at]].logprob for at in range(10 + i, len(text))]
        assert found == pytest.approx(reference(oracle, text, 10 + i), abs=1e-4)


@pytest.mark.parametrize("start, params, error, said", [
    (3, {}, ValueError, "set SamplingParams.prompt_logprobs=0."),
    (-1, {"prompt_logprobs": 0}, ValueError, "logprob_start_len=-1 is not allowed; allowed: a whole number from 0 to 4"),
    (5, {"prompt_logprobs": 0}, ValueError, "logprob_start_len=5"),
    (1.0, {"prompt_logprobs": 0}, TypeError, "prompts.0.: logprob_start_len=1.0"),
])  # fmt: skip
def test_a_start_that_cannot_be_is_refused(llm, start, params, error, said):
    with pytest.raises(error, match=said):
        scored(llm, [5, 6, 7, 8, 9], start, SamplingParams(**params))


def test_branches_go_their_own_way_and_are_joined_in_order(llm):
    state = State(llm, TEXT)
    state += gen("head", temperature=0.0, max_tokens=3, ignore_eos=True)
    branches = state.fork(3)
    for index, branch in enumerate(branches):
        branch += f" {index}:"
        branch += gen("tail", temperature=0.0, max_tokens=4, ignore_eos=True)
    branches[1] += gen("more", temperature=0.0, max_tokens=2, ignore_eos=True)
    state += " all:"
    state.join(branches, separator=" |")
    state += gen("end", temperature=0.0, max_tokens=2, ignore_eos=True)

    head = say(llm, TEXT, temperature=0.0, max_tokens=3, ignore_eos=True).text
    assert [branch["head"] for branch in branches] == [head] * 3 == [state["head"]] * 3
    assert state["tail"] == [branch["tail"] for branch in branches] and len(set(state["tail"])) > 1
    assert [sample.outputs[0].text for sample in state.output("tail")] == state["tail"]
    assert state["more"] == [branches[1]["more"]]
    added = [f" 0:{state['tail'][0]}", f" 1:{state['tail'][1]}{state['more'][0]}", f" 2:{state['tail'][2]}"]
    assert branches[1].text == TEXT + head + added[1]
    assert state.text == TEXT + head + " all:" + " |".join(added) + state["end"]
    for branch, index in zip(branches, range(3)):
        prompt = branch.output("tail").prompt_token_ids
        assert say(llm, {"prompt_token_ids": prompt}, temperature=0.0, max_tokens=4, ignore_eos=True).text == state["tail"][index]
    assert is_clean(llm)


def few_shot(llm: LLM) -> tuple[list[str], list[str]]:
    with State(llm, TEXT) as state:
        branches = state.fork(4)
        for index, branch in enumerate(branches):
            branch += f" and {index}:"
            branch += gen("answer", temperature=0.0, max_tokens=4, ignore_eos=True)
            branch += " or"
            branch += select("choice", [" the cat", " the mat"])
        state.join(branches, separator=None)
        return state["answer"], state["choice"]


def test_what_branches_share_is_computed_once(folder, oracle, llm):
    alone = make_llm(folder, enable_prefix_caching=False)
    assert few_shot(llm) == few_shot(alone) == few_shot(make_llm(folder, async_scheduling=True))
    encode = llm.get_tokenizer().encode
    shared = len(encode(TEXT)) // BLOCK * BLOCK
    prompts = [len(encode(f"{TEXT} and {index}:")) for index in range(4)]
    assert prefill_of(alone) > 3 * prefill_of(llm)
    llm = make_llm(folder)
    state = State(llm, TEXT)
    for index, branch in enumerate(state.fork(4)):
        branch += f" and {index}:"
        branch += gen("answer", temperature=0.0, max_tokens=1)
    while llm.step():
        pass
    assert prefill_of(llm) == shared + sum(prompts) - 4 * shared and rows_of(llm) == [1, 4]
    assert [submission.output().metrics.num_cached_tokens for one in state._branches for submission in one._submissions] == [shared] * 4


def test_programs_and_calls_run_in_the_same_batches(llm):
    states = [State(llm, f"{word} the cat") for word in "abc"]
    for state in states:
        state += gen("one", temperature=0.0, max_tokens=5, ignore_eos=True)
        state += " so"
        state += gen("two", temperature=0.0, max_tokens=5, ignore_eos=True)
    assert llm.engine.num_steps == 0  # nobody has waited yet
    assert states[1]["two"]
    assert rows_of(llm) == [3] * 10 and not llm.engine.has_unfinished  # the others came along
    alone = [say(llm, f"{word} the cat", temperature=0.0, max_tokens=5, ignore_eos=True).text for word in "abc"]
    steps = llm.engine.num_steps
    assert [state["one"] for state in states] == alone and all(state["two"] for state in states)
    assert llm.engine.num_steps == steps  # all of it was there

    late = State(llm, "d the cat")
    late += gen("one", temperature=0.0, max_tokens=3, ignore_eos=True)
    late += gen("two", temperature=0.0, max_tokens=3, ignore_eos=True)
    say(llm, "e", max_tokens=20, ignore_eos=True)  # somebody else's steps serve it, from one value to the next
    steps = llm.engine.num_steps
    assert late["one"] and late["two"] and llm.engine.num_steps == steps


def test_errors_name_what_is_wrong(llm):
    state = State(llm, TEXT)
    state += gen("one", max_tokens=2)
    with pytest.raises(KeyError, match="nothing is called 'two' here; there is: one"):
        state["two"]
    for piece in (gen("one"), select("one", ["a"])):
        with pytest.raises(ValueError, match="'one' is taken"):
            state += piece
    with pytest.raises(TypeError, match="not by 3"):
        state += 3
    with pytest.raises(ValueError, match="count=0"):
        state.fork(0)
    for choices in ([], ["a", ""], ["a", "a"]):
        with pytest.raises(ValueError, match="at least one, none empty, each once"):
            select("x", choices)
    with pytest.raises(TypeError, match="a list of strings"):
        select("x", "ab")
    with pytest.raises(ValueError, match="takes n=1, not n=2"):
        gen("x", n=2)
    with pytest.raises(ValueError, match="temperature=-1"):
        gen("x", temperature=-1)
    branches = state.fork(2)
    branches[0] += gen("mine", max_tokens=1)
    with pytest.raises(ValueError, match="'one' is taken"):
        branches[0] += gen("one")
    with pytest.raises(ValueError, match=r"branches\[1\] is not a branch"):
        state.join([branches[0], branches[0]])
    with pytest.raises(ValueError, match=r"branches\[0\] is not a branch"):
        state.join([State(llm, "the")])
    state.join(branches)
    for use in (lambda: branches[0].fork(1), lambda: branches[0].__iadd__("more"), lambda: state.join(branches)):
        with pytest.raises(RuntimeError, match="was joined and takes nothing more"):
            use()
    with pytest.raises(ValueError, match="'mine' is taken"):
        state += gen("mine")
    assert state["mine"] == [branches[0]["mine"]] and is_clean(llm)


@pytest.mark.parametrize("begin, piece, said", [
    ("", gen("x"), "there is no text to go on from"),
    ("", select("x", ["a", "b"]), "there is no text|needs a token before"),
    (TEXT * 9, gen("x"), "max_model_len="),
    (TEXT, select("x", ["a", TEXT * 9]), "max_model_len="),
])  # fmt: skip
def test_what_can_never_be_asked_is_said_to_whoever_reads(llm, begin, piece, said):
    state = State(llm, begin)
    [waiting] = state.fork(1)
    state.join([waiting])
    other = State(llm, TEXT)
    other += gen("fine", max_tokens=3, ignore_eos=True)
    state += piece
    for read in (lambda: state["x"], lambda: state.text, lambda: state.__iadd__("more")):
        with pytest.raises(RuntimeError, match=said):
            read()
    assert len(other.output("fine").outputs[0].token_ids) == 3
    assert is_clean(llm)


def test_a_failed_step_raises_for_all_that_wait(llm, monkeypatch):
    states = [State(llm, TEXT) for _ in range(3)]
    for state in states[:2]:
        state += gen("one", max_tokens=2, ignore_eos=True)
        state["one"]
        state += gen("two", max_tokens=9)
    branches = states[0].fork(2)
    branches[0] += gen("three")
    states[0].join(branches)
    states[2] += gen("four", max_tokens=9)
    execute = llm.engine.runner.execute
    monkeypatch.setattr(llm.engine.runner, "execute", lambda output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        states[1]["two"]
    monkeypatch.setattr(llm.engine.runner, "execute", execute)
    for state, name in [(states[0], "two"), (states[1], "two"), (states[2], "four"), (branches[0], "three"), (states[0], "three")]:
        with pytest.raises(RuntimeError, match="the program failed: .*ZeroDivisionError") as caught:
            state[name]
        assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)
    assert states[0]["one"] and is_clean(llm)
    again = State(llm, TEXT)
    again += gen("one", max_tokens=2, ignore_eos=True)
    assert again["one"] and is_clean(llm)


def test_an_abandoned_program_leaves_nothing_in_the_engine(llm):
    with pytest.raises(ZeroDivisionError), State(llm, TEXT) as state:
        state += gen("one", max_tokens=3, ignore_eos=True)
        branches = state.fork(3)
        for branch in branches:
            branch += gen("two", max_tokens=50, ignore_eos=True)
            branch += select("three", ["a", "b"])
        assert state["one"]
        for _ in range(4):
            llm.step()
        assert len(llm.engine.scheduler.requests) == 3
        raise ZeroDivisionError
    assert is_clean(llm) and state["one"]
    with pytest.raises(RuntimeError, match="was closed before this was said"):
        branches[0]["two"]
    with pytest.raises(RuntimeError, match="was closed and takes nothing more"):
        state += "more"

    state = State(llm, TEXT)
    one, two = state.fork(2)
    for branch in (one, two):
        branch += gen("x", max_tokens=50, ignore_eos=True)
    state.join([one, two])
    two.close()
    with pytest.raises(RuntimeError, match="a branch was closed before it could be joined"):
        state["x"]
    assert len(one["x"]) and is_clean(llm)
    state = State(llm, TEXT)
    state += gen("x", max_tokens=5)
    llm.engine.abort(state._submissions[0].request)
    with pytest.raises(RuntimeError, match="what this state waits for was aborted"):
        state["x"]


def test_a_submission_is_served_by_whoever_steps(llm):
    heard = []
    submission = llm.submit(TEXT, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), lambda one, delta: heard.append((one, delta)), streaming=True)
    silent = llm.submit("the cat", SamplingParams(max_tokens=60, ignore_eos=True))
    with pytest.raises(RuntimeError, match="still under way"):
        submission.output()
    expected = say(llm, TEXT, temperature=0.0, max_tokens=6, ignore_eos=True)
    assert submission.is_finished and submission.output().outputs[0] == expected
    assert "".join(delta.text for _, delta in heard) == expected.text and {one for one, _ in heard} == {submission}
    assert [delta.finish_reason for _, delta in heard] == [None] * 5 + ["length"]
    assert llm.step() and not silent.is_finished
    silent.withdraw()
    assert silent.is_finished and is_clean(llm) and not llm.step()
    with pytest.raises(RuntimeError, match="it was withdrawn"):
        silent.output()
    with pytest.raises(ValueError, match=r"submit\(\) takes 1 prompt, not 2"):
        llm.submit(["a", "b"])


CONTEXT = (
    "As everyone knows, the number of Jack is 889. She loved to watch the birds. The number of Sara is 304. In the book it "
    "says that the number of Luca is 652. He had a friend named Paul. The number of Emil is 980. The number of June is 206."
    "\nQuestion: What is the number of Jack?\nAnswer: The number of Jack is 889."
)


def test_a_few_shot_program_on_the_bundled_model():
    llm = make_llm("tinyworld", block_size=16)
    with State(llm, CONTEXT) as state:
        branches = state.fork(3)
        for branch, name in zip(branches, ["Sara", "Luca", "Emil"]):
            branch += f"\nQuestion: What is the number of {name}?\nAnswer:"
            branch += gen("answer", temperature=0.0, max_tokens=24, stop="\n")
            branch += f"\nQuestion: What is the number of {name}?\nAnswer: The number of {name} is"
            branch += select("number", [" 304", " 652", " 980", " 206"])
        state.join(branches, separator=None)
        assert state["answer"] == [" The number of Sara is 304.", " The number of Luca is 652.", " The number of Emil is 980."]
        assert state["number"] == [" 304", " 652", " 980"]
    assert max(rows_of(llm)) == 12 and is_clean(llm)
    state = State(llm, CONTEXT + "\nQuestion: What is the number of Sara?\nAnswer:")
    state += gen("answer", temperature=0.0, max_tokens=12, structured_outputs={"regex": " [0-9]{3}"})
    state += "."
    assert state["answer"] == " 304" and state.text.endswith("Answer: 304.")
    assert state.token_ids == llm.get_tokenizer().encode(state.text)  # the token that ended it is no part of the text


def test_a_loop_of_forks_keeps_no_joined_branch(llm):
    with State(llm, TEXT) as state:
        for turn in range(5):
            branches = state.fork(2)
            for branch in branches:
                branch += gen(f"said {turn}", max_tokens=2, temperature=0.0, ignore_eos=True)
            state.join(branches)
            assert len(state[f"said {turn}"]) == 2 and not state._branches
        with pytest.raises((ValueError, RuntimeError), match="joined"):
            state.join(branches)
