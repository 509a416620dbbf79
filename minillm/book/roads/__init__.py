"""Random roads: any combination of the engine's settings at once, compared with the plain engine.

    seed --draw--> Road --serve--> outputs  ==  the plain engine's, one request at a time
                     |
                     +--shrink--> the fewest settings and requests with which the comparison still fails

A table of all pairs of settings misses what only three of them do together. `minillm check --roads N` serves thousands
of random combinations, and prints each one that fails as a line that serves it again.
"""
