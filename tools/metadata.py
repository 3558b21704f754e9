"""A JSON file that describes others: a run's config.json, an adapter's adapter_config.json.

Needs: tasks.py.
"""

import json
from pathlib import Path

from tasks import unique_keys


def read_object(path: Path) -> dict:
    """→ the object in a JSON file. OSError: it cannot be read. ValueError: it is no JSON in UTF-8,
    no object, nested too deep, or has a key twice, so that one of two values would be lost.
    """
    try:
        found = json.loads(path.read_text(), object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("its brackets nest too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__!r}, which is no mapping")
    return found
