"""Where Parity agrees with verl 0.9.1 and TRL 1.16.0, and where it does not: a markdown table, on a CPU, in seconds.

The peers' own functions are called beside Parity's, on random tensors and on a few chosen ones; what agrees comes
first. The peers are no dependencies of the project, so this needs an environment of its own, outside of the checkout:

    python -m venv peers
    peers/bin/pip install -e .
    peers/bin/pip install --no-deps verl==0.9.1 trl==1.16.0 tensordict==0.15.3 pyvers cloudpickle codetiming
    peers/bin/python benchmarks/peer_agreement.py

Without --no-deps the peers would change the versions of torch and transformers under the project. A number is the
largest difference over the largest value, float32 on both sides unless a row says otherwise; for losses the larger
of loss and gradient. The exit status is 1 if a number no longer bears out its row.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from importlib.metadata import version

import torch

PEERS = {"verl": "0.9.1", "trl": "1.16.0"}
MODULES = (*PEERS, "tensordict", "pyvers", "cloudpickle", "codetiming")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random tensors")
    seed = parser.parse_args().seed
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} not installed. The docstring of this file says how to make the environment.")
    other = [f"{name} {version(name)}" for name, tested in PEERS.items() if version(name) != tested]
    if other:
        sys.stderr.write(f"{', '.join(other)}: the remarks were written for {PEERS}.\n")

    import peer_advantages
    import peer_correction
    import peer_losses
    import peer_presets
    import peer_trl
    from peer_batch import Batch

    torch.manual_seed(seed)
    batch = Batch.random(drift=0.15)
    rows = [
        *peer_correction.rows(batch),
        *peer_presets.rows(batch),
        *peer_losses.rows(batch),
        *peer_advantages.rows(batch),
        *peer_trl.rows(batch),
    ]
    ordered = sorted(rows, key=lambda row: not row.agrees)
    lines = ["| case | verl or TRL | Parity; remark |", "| --- | --- | --- |", *(row.markdown() for row in ordered)]
    sys.stdout.write("\n".join(lines) + "\n")
    broken = [row.case for row in rows if not row.holds]
    if broken:
        sys.stderr.write("no longer as the row says: " + "; ".join(broken) + "\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
