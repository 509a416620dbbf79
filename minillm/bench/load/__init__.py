"""`minillm bench serve`: load on a server, and what its clients measure. Built in chapter 24.

    lengths, arrivals -> trace -> plan -> client (a process of its own) -> outcomes -> summary -> tables, plot, JSON

`client` and `run` talk to the server. `lengths`, `arrivals`, `events`, `intervals`, `summary` and `search` are pure
functions.
"""
