"""Programs of prompts: what they say is what the engine says, what they share is counted,
what they leave is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.programs import State, gen, select
from tests.helpers.prompt_programs import BLOCK, TEXT, is_clean, make_llm, prefill_of, rows_of, say
from tests.helpers.tiny import BEGIN, save_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny-llama")


@pytest.fixture(scope="module")
def oracle(folder):
    return save_tiny_llama(folder)


@pytest.fixture
def llm(folder, oracle) -> LLM:
    return make_llm(folder)


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=0.0, max_tokens=9),
        dict(seed=3, top_k=20, max_tokens=7),
        dict(temperature=0.0, stop="a", max_tokens=30),
    ],
)
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
    # Random tokens: tokenized anew they would be others.
    assert tokenizer.encode(tokenizer.decode(known)[len(BEGIN) :]) != known
    assert second.prompt_token_ids == known + tokenizer.encode(" and ", add_special_tokens=False)
    # All that was computed, in full blocks.
    assert second.metrics.num_cached_tokens == (len(known) - 1) // BLOCK * BLOCK
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
    exact += gen("one", temperature=0.0, max_tokens=9, min_tokens=3, logit_bias={cut[0]: 100}, stop=" cat")
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
    [expected] = llm.chat(
        [{"role": "user", "content": "the cat"}], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False
    )
    assert conversation.output("answer").prompt_token_ids == expected.prompt_token_ids
    assert conversation["answer"] == expected.outputs[0].text


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
        assert (
            say(llm, {"prompt_token_ids": prompt}, temperature=0.0, max_tokens=4, ignore_eos=True).text
            == state["tail"][index]
        )
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
    assert [
        submission.output().metrics.num_cached_tokens for one in state._branches for submission in one._submissions
    ] == [shared] * 4


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


CONTEXT = (
    "As everyone knows, the number of Jack is 889. She loved to watch the birds. The number of Sara is 304. "
    "In the book it says that the number of Luca is 652. He had a friend named Paul. "
    "The number of Emil is 980. The number of June is 206.\nQuestion: What is the number of Jack?\nAnswer: "
    "The number of Jack is 889."
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
        assert state["answer"] == [
            " The number of Sara is 304.",
            " The number of Luca is 652.",
            " The number of Emil is 980.",
        ]
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
