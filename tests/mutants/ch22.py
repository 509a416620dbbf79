"""Plausible mistakes in the exercises of chapter 22 that no misconception of its checkers covers."""

from minillm.book.proofs import Mutant

MUTANTS = {
    "pick": [
        Mutant("ties to the last", replace=("-head, index))", "-head, -index))"), expect="pick"),
        Mutant("ties to the first alone", replace=("-head, index))", "index))"), expect="pick"),
    ],
    "migration_plan": [
        Mutant(
            "floats", replace=("    return best\n", "    return list(map(float, best))\n"), expect="migration_plan: "
        ),
    ],
    "resumed_stream": [
        Mutant(
            "no checks",
            replace=("if not prompt or max_tokens < 1:", "if False:"),
            expect="Here the prompt is empty",
        ),
        Mutant(
            "keeps the prompt",
            replace=("self.stop = list(prompt), max_tokens, stop", "self.stop = prompt, max_tokens, stop"),
            expect="keep copies",
        ),
        Mutant(
            "returns the output itself",
            replace=(
                "        return new\n",
                "        self.output = new if len(self.output) == len(new) else self.output\n        return new\n",
            ),
            expect="output after receive",
        ),
    ],
}
