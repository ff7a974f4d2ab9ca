"""Gather what `gpu_check.sh` left behind into one JSON object, gpu_check.json.

Writes it whatever failed, also where the package cannot be imported. Exit codes: 0; 1 when a part
failed or there is no GPU.
"""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

LISTED = 20
LAST_LINES = 5


def read_parts(directory: Path) -> list[dict[str, Any]]:
    """Each part with its exit code, its seconds and its line of JSON, if it got that far; if it failed,
    its last lines in the log."""
    parts = []
    log = (directory / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    for line in (directory / "parts.tsv").read_text(encoding="utf-8").splitlines():
        name, code, seconds, limit, end = line.split("\t")
        part: dict[str, Any] = {
            "name": name,
            "exit_code": int(code),
            "timed_out": int(code) in (124, 137),
            "seconds": int(seconds),
            "limit_seconds": int(limit),
        }
        if name == "tests":
            part["result"] = read_tests(directory / "tests.xml")
        else:
            part["result"] = read_line(directory / f"{name}.json")
        if part["exit_code"]:
            part["last_lines"] = log[: int(end)][-LAST_LINES:]
        parts.append(part)
    return parts


def read_line(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def read_tests(path: Path) -> dict[str, Any] | None:
    """Counts, and the first lines of what failed and the reasons of what was skipped."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures, reasons = [], set()
    for case in root.iter("testcase"):
        failed = [each for each in case if each.tag in ("failure", "error")]
        skipped = [each for each in case if each.tag == "skipped"]
        kind = "failed" if failed else "skipped" if skipped else "passed"
        counts[kind] += 1
        name = f"{case.get('classname')}.{case.get('name')}"
        failures += [f"{name}: {(each.get('message') or '')[:300]}" for each in failed]
        reasons.update((each.get("message") or "")[:200] for each in skipped)
    return {**counts, "failures": failures[:LISTED], "reasons_to_skip": sorted(reasons)[:LISTED]}


def replay_lines(result: dict[str, Any]) -> list[str]:
    """What a replay showed, in words."""
    rows = [row for row in result["rows"] if row["guesses"]]
    shape, acceptance = result["shape"], result["acceptance"]
    lines = [
        f"  {shape}, {acceptance}: ({row['window']}, {row['ngram']}, {row['guesses']}) "
        f"{row['ratio']['median']:.2f} x AR, {row['tokens_per_step']:.2f} tokens a step"
        for row in rows
    ]
    share = result["cost"]["share_of_copy_speed"]
    return [*lines, f"  {shape}: AR reads at {100 * share:.0f}% of the speed of copying"]


def provenance() -> dict[str, Any]:
    """As the benchmarks tell it; without the package, why not."""
    try:
        import timing
        import torch
    except (ImportError, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}", "gpu": None}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return timing.provenance(device, torch.bfloat16)


def main() -> int:
    directory = Path(sys.argv[1])
    parts, where = read_parts(directory), provenance()
    failed = [part["name"] for part in parts if part["exit_code"]]
    tests = next((part["result"] for part in parts if part["name"] == "tests"), None)
    if where["gpu"] is not None and "tests" not in failed and not (tests and tests["passed"]):
        failed.append("tests")  # all skipped for another reason: nothing was shown
    record = {
        "benchmark": "gpu_check",
        "gpu_found": where["gpu"] is not None,
        "failed": failed,
        "parts": parts,
        "provenance": where,
    }
    path = directory / "gpu_check.json"
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    for part in parts:
        print(f"{part['name']}: exit code {part['exit_code']} after {part['seconds']} s")
        if part["result"] and part["result"].get("benchmark") == "replay":
            print("\n".join(replay_lines(part["result"])))
    if not record["gpu_found"]:
        print("no GPU was found: nothing here was checked or timed on one")
    print(path)
    return int(bool(failed) or not record["gpu_found"])


if __name__ == "__main__":
    sys.exit(main())
