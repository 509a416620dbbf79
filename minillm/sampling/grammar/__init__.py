"""Structured output: a grammar says which tokens may come next. Built in chapter 19.

By hand, for a regular expression and a choice:

    "[0-9]{1,3}" --regex.py--> tree --automaton.py--> NFA -> DFA over bytes --tokens.py--> a mask of tokens a state

For JSON Schema and context-free grammars a library does the same (`library.py`). Either way a request holds a `Grammar`
(`protocol.py`), and `mask.py` turns the grammars of a batch into -inf where the sampler must not go.
"""
