"""Grading that a student cannot fool: each submission runs in a confined process, judged by pristine checkers.

The parts, in the order in which a submission passes them:

    plan         which cells run, in which order; the graded lines come from the lecturer's notebook alone
    look         what the student's source says: frames, checkers, memory, other programs
    worker       drives one zygote, measures time, collects verdicts            (the lecturer's process)
    zygote       has imported torch and the checkers, and forks for each submission; never runs a student's code
    confine      namespaces, limits, a private folder                           (the student's process, from here on)
    guards       makes events of what CPython reports to no hook
    audit        refuses frames, memory, processes and files while the student's code runs
    fingerprint  what the checkers and the functions they call were, compared and restored
    child        runs the cells; forks for each exercise, and judges it there

One process cannot wholly hide its memory from the code that it runs. So nothing here trusts a single wall: whatever
gets past one of them is recorded by another, and a person decides with `--accept STUDENT/CHAPTER/EXERCISE`.
"""
