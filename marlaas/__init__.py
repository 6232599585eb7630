"""The scheduler core and its contracts: facts in, orders out.

Pure: standard library and msgspec only. No clock, no I/O, no asyncio, no simpy, no torch, no global
random. Read `events.py`, `commands.py`, then `scheduler.py`.
"""

__version__ = "0.1.0"
