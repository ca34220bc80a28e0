"""Steps that verl and TRL write, read by Parity: their own mismatch metrics against what is read back.

verl 0.9.1 and TRL 1.16 run from the package index: see the docstring of `peer_agreement.py` for the environment. The
lines of docs/bundle.md write their bundles. `--keep DIR` keeps the files, and writes numbers.json with the peers'
numbers, for the tests; `--responses 8 --longest 10` makes them small.

A number is in float32 at verl and TRL, as their trainers compute it. The exit status is 1 if a number read back differs
by more than 1e-6.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
from bundle_rows import TITLES, Case

NEEDED = ("verl", "trl", "tensordict", "pyvers", "cloudpickle", "codetiming")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the random tensors")
    parser.add_argument("--responses", type=int, default=96)
    parser.add_argument("--longest", type=int, default=40, help="tokens of the longest response")
    parser.add_argument("--keep", type=Path, help="directory for the files and their numbers")
    arguments = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} not installed. peer_agreement.py says how to make the environment.")
    with tempfile.TemporaryDirectory(prefix="parity-peers-") as scratch:
        place = Path(scratch) if arguments.keep is None else arguments.keep
        place.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr):  # trainers print there
            found = cases(place, arguments)
    lines = [TITLES, *(case.markdown() for case in found)]
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.keep is not None:
        numbers = [
            {"peer": case.peer, "name": case.name, "metric": case.metric, "value": case.theirs}
            for case in found
            if case.theirs is not None
        ]
        (place / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    broken = [f"{case.peer} {case.name}" for case in found if not case.holds]
    if broken:
        sys.stderr.write("not read back: " + "; ".join(broken) + "\n")
    return int(bool(broken))


def cases(place: Path, arguments: argparse.Namespace) -> list[Case]:
    """The rows of both peers; their files are written to `place`."""
    import bundle_trl
    import bundle_verl
    from peer_batch import Batch

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    batch = Batch.random(drift=0.0, responses=arguments.responses, longest=arguments.longest)
    return [*bundle_verl.cases(place, batch), *bundle_trl.cases(place)]


if __name__ == "__main__":
    sys.exit(main())
