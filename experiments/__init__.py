"""The composition root: YAML in, runs, reports and answers out. The only package that knows both worlds."""
