"""What a script of bench/ builds for a GPU that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def builds_of(script: str, architecture: str) -> list[dict]:
    """By a process of its own, for this one may hold the kernels as the interpreter's functions."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BENCH.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, BENCH / script, architecture],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
