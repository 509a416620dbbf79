"""A fleet of replicas on a virtual clock. Built in chapter 22.

trace ──> router policy ──> SimulatedReplica ... SimulatedReplica     traces, replica
              ▲                      │ KV transfers, migrations        links
              │                      │ failures, cold starts           faults, autoscaling
              └── FleetView <── load and block hashes                  minillm.engine.routing
"""
