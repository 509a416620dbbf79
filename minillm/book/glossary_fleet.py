"""The terms of chapter 22 in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
FLEET_TERMS = [
    Term("autoscaling", "Changing the number of replicas with the load.",
         "", "", "`target_ongoing_requests` (Ray Serve)", 22),
    Term("cold start", "The time from the order for a replica to its first step: process, imports, weights, warm-up.",
         "", "", "ServerlessLLM (Fu et al., 2024)", 22),
    Term("failover", "Going on at another replica when one has died, with the tokens that the client has.",
         "", "", "", 22),
    Term("flight", "A request on one replica; after a failover it goes on in a new flight.", "", "", "", 22),
    Term("freeness", "Free KV tokens of a replica for each running request; the measure by which requests are moved.",
         "", "", "Llumnix (Sun et al., 2024)", 22),
    Term("live migration",
         "Moving a running request to another replica: its blocks are copied while it decodes, and only the last, "
         "short copy stops it.",
         "", "", "Llumnix (Sun et al., 2024)", 22),
    Term("power of two choices", "Routing to the less loaded of two replicas that are drawn at random.",
         "", "`--policy power_of_two`", "Mitzenmacher, 2001", 22),
    Term("prefix-aware routing", "Routing by load and by the blocks that each replica caches.",
         "", "`--policy cache_aware`", "Preble (Srivatsa et al., 2024)", 22),
    Term("replica", "One engine with a copy of the whole model; a fleet has many.",
         "", "worker", "instance", 22),
    Term("router", "What picks the replica that a request goes to.", "", "`sgl-router`", "", 22),
]
# fmt: on
