"""Plausible mistakes in the exercises of chapter 22 that no misconception of its checkers covers."""

from minillm.book.proofs import edited

MUTANTS = {
    "pick": [
        edited("ties to the last", "-head, index))", "-head, -index))", "pick"),
        edited("ties to the first alone", "-head, index))", "index))", "pick"),
    ],
    "migration_plan": [
        edited("floats", "    return best\n", "    return list(map(float, best))\n", "migration_plan: "),
    ],
    "resumed_stream": [
        edited("no checks", "if not prompt or max_tokens < 1:", "if False:", "Here the prompt is empty"),
        edited(
            "keeps the prompt",
            "self.stop = list(prompt), max_tokens, stop",
            "self.stop = prompt, max_tokens, stop",
            "keep copies",
        ),
        edited(
            "returns the output itself",
            "        return new\n",
            "        self.output = new if len(self.output) == len(new) else self.output\n        return new\n",
            "output after receive",
        ),
    ],
}
