"""The study of the original's claims: YAMLs that run it, and what came out as claims and a page."""
