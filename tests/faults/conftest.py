"""The scenarios use what the tests of the parts use: their helpers are found as from those tests."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("rollout", "trainer", "e2e"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))
