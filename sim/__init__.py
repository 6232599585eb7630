"""The simulated world: a clock, a cost model and random streams behind the core's `Backend`.

Read in this order: `engine` (a replica's continuous batching), `streams` (the workload), `profile` (what
things cost), `backend` (commands in, events out), `run` (a whole experiment), `calibrate` (a profile from
traces). Knows the core and traces; never torch.
"""

from sim.profile import Profile, dump_profile, load_profile
from sim.run import simulate

__all__ = ["Profile", "dump_profile", "load_profile", "simulate"]
