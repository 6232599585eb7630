"""Sweeps: one base experiment, varied along axes, replicated, simulated in parallel, made into tables.

Read in this order: `axes` (what varies), `study` (the YAML), `cells` (an experiment for every combination),
`work` (one cell simulated), `folder` (what is kept), `run` (all cells, in processes), `statistics`, `tables`,
`figures`. Imports nothing here: the command line must start fast.
"""
