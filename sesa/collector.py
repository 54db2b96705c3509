"""Python's cycle collector while rollouts run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects before the young are looked through; Python's own 700 is reached several times within a rollout.
YOUNG_OBJECTS = 50_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collects now, then seldom, and no longer looks through what exists already: corpus, index, libraries.

    Rollouts make many objects that die by themselves. At Python's defaults a quarter of the processor time of the
    graphs goes into looking for cycles among them (`benchmarks/rollout_overhead.py`). The former settings come back
    at the end.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
