"""The tokenizer that a GGUF file describes in its metadata, built with the `tokenizers` library. Built in chapter 15.

    tokenizer.ggml.model           "gpt2": pairs of bytes are merged in a stored order, inside the words of a text
                                   "llama": pairs are merged by the score of what they give, over the whole text
    tokenizer.ggml.pre             how "gpt2" cuts a text into words: `minillm.model.gguf_splits`
    tokenizer.ggml.tokens, .token_type, .scores, .merges
    tokenizer.ggml.bos_token_id, .add_bos_token, ...

What a file leaves out is what llama.cpp takes for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minillm.model.gguf_splits import SPLITS, Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PREFIX = "tokenizer.ggml."
SPACE = "▁"  # how SentencePiece writes a space
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens that are cut out of a text before all else
INSTEAD = "pass the Hugging Face folder that the file was converted from"
AGAIN = "convert the model again"
LLAMA_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where tokenizer.ggml.model is "llama"
END_KEYS = ("eos", "eot", "eom")  # of a text, of a turn, of a message
# Control tokens that end a text or a turn, whether the file says so or not.
END_NAMES = frozenset(
    "</s> <|endoftext|> <|end_of_text|> <｜end▁of▁sentence｜> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> "
    "<end_of_utterance> <EOT> _<EOT> [EOT] [EOS]".split()
)
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def gguf_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Raises ValueError for a kind of tokenizer that is not read, and for metadata that is missing or damaged."""
    from transformers import PreTrainedTokenizerFast

    read = _Read(metadata)
    special = {name: read.tokens[token_id] for name, token_id in read.special_ids.items()}
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template={template!r:.80} is not a text")
    return PreTrainedTokenizerFast(
        tokenizer_object=KINDS[read.kind](read),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **special,
    )


def special_id(metadata: Mapping[str, Any], key: str) -> int | None:
    """The id of a special token ("bos", "eos", ...) as the file has it, or as llama.cpp takes it to be."""
    default = LLAMA_IDS.get(key) if metadata.get(f"{PREFIX}model") == "llama" else None
    return metadata.get(f"{PREFIX}{key}_token_id", default)


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text: those that the file names, then those whose text says so, as in llama.cpp."""
    named = [token_id for key in END_KEYS if (token_id := special_id(metadata, key)) is not None]
    tokens, types = (metadata.get(f"{PREFIX}{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list):
        return list(dict.fromkeys(named))
    told = [i for i, (text, kind) in enumerate(zip(tokens, types)) if kind == CONTROL and text in END_NAMES]
    return list(dict.fromkeys(named + told))


class _Read:
    """What the metadata says, checked: tokens by id, their types, the special ones by name."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        self.kind = self.value("model", str)
        if self.kind not in KINDS:
            raise ValueError(
                f"{PREFIX}model={self.kind!r} is not supported; supported: gpt2 (byte-level BPE), llama "
                f"(SentencePiece BPE); {INSTEAD}"
            )
        # A token without a text is named as llama.cpp names it.
        self.tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(self.values("tokens", str))]
        self.ids = {text: index for index, text in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(text for index, text in enumerate(self.tokens) if self.ids[text] != index)
            raise ValueError(f"{PREFIX}tokens has {twice!r} twice; {AGAIN}")
        self.types = self.values("token_type", int, len(self.tokens)) if f"{PREFIX}token_type" in metadata else []
        self.split = self._split() if self.kind == "gpt2" else None
        self.special_ids = self._special_ids()

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(PREFIX + key, default)
        if value is None:
            raise ValueError(f"its metadata has no {PREFIX + key!r}, which the tokenizer cannot be built without")
        if not isinstance(value, kind):
            raise ValueError(f"{PREFIX}{key}={value!r:.80} is not of type {kind.__name__}; {AGAIN}")
        return value

    def values(self, key: str, kind: type, count: int | None = None) -> list[Any]:
        values = self.value(key, list)
        if wrong := [value for value in values if not isinstance(value, kind)][:1]:
            raise ValueError(f"{PREFIX}{key} has {wrong[0]!r:.80}, which is not of type {kind.__name__}; {AGAIN}")
        if count is not None and len(values) != count:
            raise ValueError(f"{PREFIX}{key} has {len(values):,} entries for {count:,} tokens; {AGAIN}")
        return values

    def _split(self) -> Split:
        name = self.value("pre", str, "default")
        if name not in SPLITS:
            raise ValueError(
                f"{PREFIX}pre={name!r} is not supported; supported: {', '.join(sorted(SPLITS))}; {INSTEAD}"
            )
        return SPLITS[name]

    def _special_ids(self) -> dict[str, int]:
        found = {}
        for name, key in SPECIAL.items():
            if (token_id := special_id(self.metadata, key)) is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
                raise ValueError(
                    f"{PREFIX}{key}_token_id={token_id!r:.80} is none of the {len(self.tokens):,} tokens; {AGAIN}"
                )
            found[name] = token_id
        return found

    def added(self) -> list[AddedToken]:
        """The tokens that a text is searched for first. Control tokens are not part of a text that is shown."""
        return [
            AddedToken(text, special=kind != USER_DEFINED, normalized=False)
            for text, kind in zip(self.tokens, self.types)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]

    def frame(self) -> processors.TemplateProcessing:
        """The special tokens that stand around every text."""
        begin = self._framing("bos", self.split is None or self.split.add_bos)
        end = self._framing("eos", False)
        ids = {text: self.ids[text] for text in begin + end}
        return processors.TemplateProcessing(single=[*begin, "$A", *end], special_tokens=list(ids.items()))

    def _framing(self, name: str, default: bool) -> list[str]:
        """The token if every text has it, as a list of one."""
        if not self.value(f"add_{name}_token", bool, default):
            return []
        if (token_id := self.special_ids.get(f"{name}_token")) is None:
            raise ValueError(f"every text is to have a {name} token, but it has no {PREFIX}{name}_token_id; {AGAIN}")
        return [self.tokens[token_id]]


def _byte_level(read: _Read) -> Tokenizer:
    merges = dict.fromkeys(_pair(merge) for merge in read.values("merges", str))
    for left, right in merges:
        if not {left, right, left + right} <= read.ids.keys():
            raise ValueError(
                f"{PREFIX}merges has '{left} {right}', but {left!r}, {right!r} and {left + right!r} are not all "
                f"tokens; {AGAIN}"
            )
    tokenizer = Tokenizer(models.BPE(read.ids, list(merges), ignore_merges=read.split.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in read.split.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, read)


def _sentencepiece(read: _Read) -> Tokenizer:
    """A space becomes ▁, a character without a token becomes the tokens of its bytes."""
    scores = read.values("scores", Real, len(read.tokens))
    merges, unknown = _merges_by_score(read.tokens, read.ids, scores), read.tokens[read.special_ids["unk_token"]]
    tokenizer = Tokenizer(models.BPE(read.ids, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if read.value("add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer, tokenizer.decoder = spaces, decoders.Sequence(decoding)
    return _finished(tokenizer, read)


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _finished(tokenizer: Tokenizer, read: _Read) -> Tokenizer:
    tokenizer.add_tokens(read.added())
    tokenizer.post_processor = read.frame()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """Two tokens with a space between; the first may begin with one."""
    at = merge.find(" ", 1)
    if at < 0:
        raise ValueError(f"{PREFIX}merges has {merge!r}, which is not two tokens with a space between them; {AGAIN}")
    return merge[:at], merge[at + 1 :]


def _merges_by_score(tokens: list[str], ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the two neighbours that give the token of the highest score, the leftmost of equals. As a
    list of merges: every pair of tokens that gives a token, the highest score first.

    Of the pairs that give one token, two may want the same neighbour: elle of ell|e|lle. Then the left one is first.
    """
    merges = []
    for token_id in sorted(range(len(tokens)), key=lambda token_id: -scores[token_id]):
        token = tokens[token_id]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(pairs, key=lambda pair: token.endswith(pair[0]) - token.startswith(pair[1]))
    return merges
