"""Puts the checkout on the import path, so that a bare `pytest` finds `generated`, `bench` and `tests`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
