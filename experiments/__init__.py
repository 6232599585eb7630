"""The composition root: YAML in, runs, reports and answers out. The only package that knows both worlds."""

from experiments import compiled

compiled.prefer()  # before anything is imported that there may be as machine code
