"""Draws random roads from a seed, of settings that may stand together."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

from minillm.book.roads.models import ADAPTERS, LATENT, MODELS, MXFP4, VOCAB_SIZE
from minillm.book.roads.road import GREEDY, Arrival, Road

NUM_REQUESTS = 120  # different ones for the roads of a thousand seeds: the plain engine serves each of them once
FIRST_TOKEN = 4  # those before it are special
LONGEST_PROMPT, MAX_TOKENS = 60, 20
TRITON_EVERY = 100  # roads: Triton's interpreter takes a second for what the other backends do in milliseconds
MOST_IN_TRITON = 3  # tokens of an answer
POLICIES = ("fcfs", "priority", "preemptive_priority", "sjf", "fair", "lpm")
GRAMMARS = (
    {"regex": "[a-z ]{2,12}"},
    {"regex": "(ab|cd)+[0-9]{1,3}"},
    {"choice": ["yes", "no", "not yet"]},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
    {"regex": "The answer is [0-9]{2}", "jump_forward": True},
    {"regex": "[0-9]{1,3}", "after": "a", "thinking_token_budget": 6},
    {"json": {"enum": [[1, 2], "ab", None]}, "after": " e", "thinking_token_budget": 3, "jump_forward": True},
    {"begin": "The "},
)


def draw(seed: int) -> Road:
    """The road of a seed, the same on every machine."""
    rng = Random(f"road {seed}")
    model = rng.choice([name for name in MODELS if name not in (LATENT, MXFP4)])
    values: dict[str, Any] = {"model": model}
    values |= _weights_and_cache(rng, model)
    values |= _engine(rng, values)
    if seed % TRITON_EVERY == 0:
        values |= rng.choice(({"attention": "triton"}, {"attention": "auto", "like_a_gpu": "ahead,triton"}))
        values |= {"rounds": 1, "adaptive": False}
        requests = tuple(_request(rng, seed, MOST_IN_TRITON) for _ in range(2))
    else:
        requests = tuple(_request(rng, seed) for _ in range(rng.randint(3, 8)))
    if values["kv"] != "auto" and Random(f"int4 {seed}").random() < 0.4:
        values["kv"] = "int4"
    values["max_loras"], requests = _adapters(Random(f"adapter {seed}"), requests)
    if values["weights"] == "int4" and not values["max_loras"] and Random(f"rotated {seed}").random() < 0.5:
        values["weights"] = "rotated"  # which takes no adapters
    elif values["weights"] is not None and (rng := Random(f"blocks of fp4 {seed}")).random() < 0.4:
        values["weights"] = rng.choice(("mxfp4", "nvfp4"))
    if seed % TRITON_EVERY and values["weights"] != "rotated" and Random(f"latents {seed}").random() < 0.2:
        values |= _latents(values)
    elif not values["max_loras"] and _learns_its_sinks(seed):
        values |= {"model": MXFP4, "weights": None, "sinks": None, "offload": False}
    if values["speculation"] == "eagle" and values["weights"] == "rotated":
        values["speculation"] = "noisy"  # a head reads hidden states that are not rotated
    elif values["speculation"] == "eagle" and Random(f"eagle3 {seed}").random() < 0.5:
        values["speculation"] = "eagle3"
    road = Road(requests, **values)
    if not road.chunked:
        road = Road(requests, **values | {"budget": road.max_model_len + rng.choice((0, 5, 60))})
    return road


def draw_parallel(seed: int) -> Road:
    """The road of a seed, in several processes: what these refuse is left out."""
    rng, road = Random(f"processes {seed}"), draw(seed)
    tensor_parallel, stages = rng.choice(((2, 1), (2, 1), (4, 1), (1, 2), (1, 2), (2, 2)))
    if MODELS[road.model].get("num_hidden_layers", 2) > 2 and rng.random() < 0.6:
        tensor_parallel, stages = rng.choice(((1, 3), (1, 3), (2, 3)))
    prefix_on_host = road.prefix and road.sinks is None
    # Its 64 inputs of an expert are two blocks, which four ranks cannot share.
    spread = road.model == MXFP4 and tensor_parallel > 1 and (tensor_parallel > 2 or rng.random() < 0.5)
    return replace(
        road,
        spread=spread,
        tensor_parallel=tensor_parallel,
        stages=stages,
        late=_late(seed, tensor_parallel * stages),
        disk_blocks=0,
        restart=False,
        fails_at=None,
        host_blocks=road.host_blocks if road.swap or prefix_on_host else 0,
        speculation="noisy" if road.speculation in ("eagle", "eagle3") else road.speculation,
        attention="torch" if road.attention == "triton" else road.attention,
        like_a_gpu="ahead" if road.like_a_gpu else "",
    )


def _late(seed: int, num_ranks: int) -> int | None:
    """The rank that is late; None in half of the configurations."""
    rng = Random(f"late {seed}")
    return rng.randrange(num_ranks) if rng.random() < 0.5 else None


def _learns_its_sinks(seed: int) -> bool:
    """Whether the model is gpt-oss; more often in Triton, which has few roads."""
    if seed % TRITON_EVERY:
        return Random(f"gpt-oss {seed}").random() < 0.12
    return Random(f"learned sinks {seed}").random() < 0.3


def _latents(values: dict[str, Any]) -> dict[str, Any]:
    """The same road over latents."""
    refused = values["attention"] == "native" and values["kv"] != "auto"  # latents in codes
    return {"model": LATENT, "attention": "torch" if refused else values["attention"], "sinks": None, "offload": False}


def _adapters(rng: Random, requests: tuple[Arrival, ...]) -> tuple[int, tuple[Arrival, ...]]:
    """Batch slots, and the requests with adapters: in three of ten roads."""
    if rng.random() < 0.7:
        return 0, requests
    return rng.choice((1, 2, 3)), tuple(replace(one, adapter=rng.choice((None, *ADAPTERS))) for one in requests)


def _weights_and_cache(rng: Random, model: str) -> dict[str, Any]:
    return {
        "weights": _mostly(rng, None, "int8", "int4"),
        "kv": _mostly(rng, "auto", "int8", "fp8"),
        "sinks": _mostly(rng, None, 0, 1, 5) if model == "llama" else None,
    }


def _engine(rng: Random, values: dict[str, Any]) -> dict[str, Any]:
    """Settings that `values` allows; what the engine would refuse is not drawn."""
    keeps_prefixes = values["sinks"] is None
    prefix = rng.random() < 0.7
    swap = rng.random() < 0.5
    host = rng.choice((1, 2, 5, 40)) if swap or (prefix and keeps_prefixes and rng.random() < 0.5) else 0
    disk = rng.choice((3, 60)) if host and prefix and keeps_prefixes and rng.random() < 0.3 else 0
    attention = rng.choice(("torch", "native", "native", "auto"))
    like_a_gpu = rng.choice(("", "ahead")) if attention == "auto" else ""
    drafters = ("ngram", "ngram", "noisy", "same", "another") if keeps_prefixes else ("ngram",)
    speculation = rng.choice(drafters) if rng.random() < 0.4 else None
    if speculation in ("same", "another") and rng.random() < 0.6:
        speculation = "eagle"
    return {
        "block_size": rng.choice((1, 2, 3, 4, 4, 7, 16)),
        "budget": rng.choice((rng.randint(1, 3), 5, 8, 12, 16, 40, 8192)),
        "spare_blocks": rng.choice((0, 0, 1, 2, 3, 6, 12, None)),
        "spare_tokens": rng.choice((0, 0, 1, 9)),
        "max_num_seqs": rng.choice((1, 2, 3, 4, 8, 256)),
        "policy": rng.choice(POLICIES),
        "chunked": rng.random() < 0.85,
        "prefix": prefix, "host_blocks": host, "swap": swap, "disk_blocks": disk,
        "speculation": speculation, "num_drafts": rng.choice((1, 2, 4, 7)),
        "adaptive": bool(speculation) and rng.random() < 0.25,
        "attention": attention, "recorded": rng.random() < 0.5, "ahead": rng.random() < 0.5, "like_a_gpu": like_a_gpu,
        "rounds": rng.choice((1, 1, 2, 2, 2, 3)), "restart": bool(disk) and rng.random() < 0.5,
        "together": rng.random() < 0.2,
        "offload": values["model"] == "qwen3" and values["weights"] is None and rng.random() < 0.3,
        "fails_at": rng.randint(0, 25) if rng.random() < 0.1 else None,
    }  # fmt: skip


def _request(rng: Random, seed: int, most_tokens: int = MAX_TOKENS) -> Arrival:
    prompt, params, start = _asked(seed // 1000, rng.randrange(NUM_REQUESTS))
    params = dict(params)
    if most_tokens < MAX_TOKENS:
        params = {"temperature": 0.0, "max_tokens": most_tokens}
        prompt, start = prompt[:6], 0
    at = rng.choice((0, 0, 0, rng.randint(1, 30)))
    return Arrival(
        prompt, params, at, at + rng.randint(0, 25) if rng.random() < 0.12 else None, withdrawn=rng.random() < 0.5,
        streaming=rng.random() < 0.3, priority=rng.randint(0, 2), user=rng.choice("ab"),
        salt=_mostly(rng, None, "x", "y"), logprob_start=start,
    )  # fmt: skip


@cache
def _asked(thousand: int, number: int) -> tuple[tuple[int, ...], dict[str, Any], int]:
    """Prompt, parameters and `logprob_start_len` of one of the requests that roads draw from."""
    rng = Random(f"request {thousand} {number}")
    prompt = _prompt(rng, thousand)
    params = {"max_tokens": rng.choice((1, 2, 5, 12, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS))} | _drawing(rng)
    if rng.random() < 0.2:
        params |= rng.choice(({"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.4}))
    if rng.random() < 0.1:
        params["logit_bias"] = {str(_token(rng)): rng.choice((-5.0, 3.0, 8.0)) for _ in range(3)}
    if rng.random() < 0.15:
        params["logprobs"] = rng.choice((0, 2, 5))
    start = 0
    if rng.random() < 0.12:
        params["prompt_logprobs"] = rng.choice((0, 3))
        start = rng.choice((0, rng.randrange(len(prompt))))
    params |= _ends(rng, params)
    return prompt, params | _rules(Random(f"rules {thousand} {number}"), params), start


def _prompt(rng: Random, thousand: int) -> tuple[int, ...]:
    """A shared head, a tail of its own, and now and then a phrase that comes again, which n-grams find."""
    text = Random(f"text {thousand} {rng.randrange(3)}")
    head = [_token(text) for _ in range(40)][: rng.choice((0, 0, 3, 8, 16, 25, 32, 40))]
    tail = [_token(rng) for _ in range(rng.choice((0, 1, 1, 4, 9, 20)))]
    if rng.random() < 0.3:
        tail = (tail or [_token(rng)])[:5] * 4
    return tuple(head + tail)[:LONGEST_PROMPT] or (_token(rng),)


def _drawing(rng: Random) -> dict[str, Any]:
    """Greedy, seeded, or drawn without a seed: those are served among the others, and not compared."""
    kind = rng.random()
    if kind < 0.5:
        return dict(GREEDY)
    params: dict[str, Any] = {"temperature": rng.choice((0.3, 0.8, 1.0, 1.6))}
    if kind < 0.88:
        params["seed"] = rng.randrange(1000)
    if rng.random() < 0.4:
        params |= rng.choice(({"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9}))
    if rng.random() < 0.3:
        params["n"] = rng.choice((2, 3))
    return params


def _ends(rng: Random, params: dict[str, Any]) -> dict[str, Any]:
    """What ends the text: a grammar, a stop string or token, the end-of-sequence token,
    or only the number of tokens."""
    if rng.random() < 0.15:
        grammar = dict(rng.choice(GRAMMARS))
        if "logprobs" in params:  # those of a token that is forced are not computed
            grammar.pop("jump_forward", None)
        return {"structured_outputs": grammar}
    ends: dict[str, Any] = {"ignore_eos": True} if rng.random() < 0.5 else {}
    if rng.random() < 0.15:
        ends["stop"] = rng.choice((["e"], ["ab", "t"], ["\n", " a"]))
    if rng.random() < 0.2:
        ends["stop_token_ids"] = sorted({_token(rng) for _ in range(15)})
    if ends and rng.random() < 0.5:
        ends["min_tokens"] = rng.randint(1, params["max_tokens"])
    return ends


def _rules(rng: Random, params: dict[str, Any]) -> dict[str, Any]:
    """Which tokens may come at all, which are reported, and what is shown of the text."""
    rules: dict[str, Any] = {}
    if rng.random() < 0.12 and "structured_outputs" not in params:
        rules["allowed_token_ids"] = sorted({_token(rng) for _ in range(60)})
    if rng.random() < 0.12 and "structured_outputs" not in params:
        rules["bad_words"] = rng.choice((["e"], ["a t", "n"], ["the"]))
    if rng.random() < 0.1 and not {"logprobs", "structured_outputs"} & params.keys():
        rules["logprob_token_ids"] = [_token(rng), _token(rng)]
    if rng.random() < 0.3 and {"stop", "stop_token_ids"} & params.keys():
        rules["include_stop_str_in_output"] = True
    return rules


def _token(rng: Random) -> int:
    return rng.randrange(FIRST_TOKEN, VOCAB_SIZE)


def _mostly(rng: Random, usual: Any, *others: Any) -> Any:
    """The usual value, or in one of six draws another."""
    return rng.choice(others) if rng.random() < 1 / 6 else usual
