"""How a GGUF file's `tokenizer.ggml.pre` cuts text into words, before pairs of bytes are merged. Built in chapter 15.

A token never reaches beyond its word, so the same merges with another cut are another tokenizer. The file only names
the cut; the expressions are those that the models of each name were trained with. (llama.cpp has simpler ones for
tekken and gpt-4o, which cut words of scripts with vowel signs, like Hindi, in other places.) They are applied one after
the other: each cuts what the ones before it have left, into what it matches and what stands between.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# The letters of a word: capitals then small ones, as in "Hello", or capitals alone.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITALIZED = [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"]
SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
# DeepSeek LLM's letters of scripts with capitals. Characters that editors replace by another one are written as \u.
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ"
    "-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
IDEOGRAPHS, KANA = "一-龥", "぀-ゟ゠-ヿ"
ASCII_SIGN_AND_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""


def gpt4(digits: str, letters: str = r"\p{L}", contractions: str = CONTRACTIONS + "|") -> str:
    """The expression of GPT-4's kind, which differs from model to model in how many digits stay together."""
    others = r"[^\s\p{L}\p{N}]" if letters == r"\p{L}" else r"[^\s\p{L}\p{M}\p{N}]"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    return rf"{contractions}{word}|{digits}| ?{others}+[\r\n]*|{LINES_AND_SPACES}"


def gpt4o(digits: str, contractions: str = CONTRACTIONS + "?") -> str:
    words = "|".join(word + contractions for word in CAPITALIZED)
    return rf"{words}|{digits}|{SIGNS_AND_SLASHES}|{LINES_AND_SPACES}"


def deepseek3(after_signs: str = r"[\r\n]*", lines: str = r"\s*[\r\n]+") -> tuple[str, ...]:
    word = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rest = rf"{ASCII_SIGN_AND_WORD}|{word}| ?[\p{{P}}\p{{S}}]+{after_signs}|{lines}|\s+(?!\S)|\s+"
    return r"\p{N}{1,3}", f"[{IDEOGRAPHS}{KANA}]+", rest


@dataclass(frozen=True)
class Split:
    """`ignore_merges`: a word that is a token is that token, whatever the merges would make of it.
    `add_bos`: a text begins with the beginning-of-sequence token unless the file says otherwise."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = gpt4(r"\p{N}{1,3}"), gpt4(r"\p{N}")
NO_SENTENCE_SIGN = r" ?[^(\s|.,!?…。，、।۔،)]+"
SEED_CODER = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES_AND_SPACES}"
EXAONE_MOE = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)

BY_NAMES = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4": Split((GPT2,)),
    "mpt olmo jais trillion granite-docling": Split((GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Split((r"\p{N}", GPT2)),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Split((LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe": Split((LLAMA3,)),
    "glm4 glm5": Split((LLAMA3,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2": Split((QWEN2,)),
    "bailingmoe bailingmoe2 llada-moe": Split((QWEN2,)),  # written otherwise, with the same words
    "qwen35": Split((gpt4(r"\p{N}", r"[\p{L}\p{M}]"),)),
    "ufakzeka": Split((gpt4(r"\p{N}", contractions=""),)),
    "minicpm5": Split((r"\p{N}{1,3}", gpt4(r"\p{N}+")), ignore_merges=True),
    "laguna": Split((r"[^\n]+|[\n]+", QWEN2)),
    "tekken": Split((gpt4o(r"\p{N}", contractions=""),), True, True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Split((gpt4o(r"\p{N}{1,3}"),)),
    "tiny_aya cohere2moe": Split((r"\d{1,3}(?=(?:\d{3})*\b)", gpt4o(r"\p{N}{1,3}"))),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{CASED}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            f"[{IDEOGRAPHS}ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{IDEOGRAPHS}ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Split(deepseek3()),
    "spark2_5": Split((*deepseek3("", r"[\r\n]"), r"\p{N}")),
    "poro-chat bloom gpt3-finnish": Split((NO_SENTENCE_SIGN,)),
    "viking": Split((NO_SENTENCE_SIGN, r"\p{N}")),
    "seed-coder": Split((SEED_CODER,)),
    "exaone-moe": Split((EXAONE_MOE,)),
}
SPLITS: dict[str, Split] = {name: split for names, split in BY_NAMES.items() for name in names.split()}
