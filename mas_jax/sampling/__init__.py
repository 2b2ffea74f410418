"""Sampling: the engine that continues token sequences, and what stands in for it.

`engine.py` is the front; `scheduler.py` decides what the next device call does, `pages.py` keeps
the books of the key/value pool, `programs.py` holds the device calls, `draw.py` draws tokens.
"""
