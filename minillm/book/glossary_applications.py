"""The terms of grammars and caches in applications, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
APPLICATION_TERMS = [
    Term("agent loop",
         "A program that calls a model, runs the tool that it asks for, and sends everything again with the result.",
         "", "", "ReAct (Yao et al., 2022)", 7),
    Term("marker", "The text behind which a grammar begins, such as `</think>`; before it the text is free.",
         "`is_reasoning_end`", "", "", 19),
    Term("prompt caching",
         "Prefix caching as providers sell it: prompt tokens from the cache are billed at a fraction of the price.",
         "`cached_tokens`", "`cached_tokens`", "", 7),
    Term("thinking budget", "The most tokens before the marker; when they are spent, the marker is forced.",
         "`thinking_token_budget`", "", "", 19),
    Term("token healing",
         "The last tokens of a prompt are generated anew and have to begin with their text: a cut word goes on.",
         "", "", "guidance", 19),
    Term("tool call", "A text in which a model asks its program to call a function, with arguments as JSON.",
         "`ToolCall`", "`ToolCallItem`", "function calling", 19),
    Term("tool parser", "Reads tool calls out of a text as it streams, in the format that a model was trained on.",
         "`--tool-call-parser`", "`--tool-call-parser`", "", 19),
]
