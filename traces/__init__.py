"""The one record of a run: schema, writer, reader, replay, metrics, laws, exports.

Knows `marlaas` and neither world. Read `schema.py`, `writer.py`, `reader.py`, then `metrics/` and `laws/`.
"""
