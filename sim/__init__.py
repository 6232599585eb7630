"""The simulated world: a clock, a cost model and random streams behind the core's `Backend`.

Read in this order: `engine` with `batch`, `sequences`, `prefix_cache` and `costs` (a replica's continuous
batching), `workload` and `streams` (what trajectories do), `profile` (what things cost), `backend` with
`replica`, `lane` and `host` (commands in, events out), `run` (a whole experiment), `calibrate` (a profile
from traces). Knows the core and traces; never torch.
"""

from sim.profile import Profile
from sim.profile_files import dump_profile, load_profile
from sim.run import simulate

__all__ = ["Profile", "dump_profile", "load_profile", "simulate"]
