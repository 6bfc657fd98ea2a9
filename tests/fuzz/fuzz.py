"""Coverage-guided fuzzing with atheris (`pip install atheris`): see `make fuzz`.

    python tests/fuzz/fuzz.py [--target=NAME ...] [--runs=N] [--output=benchmarks/fuzz.json]
    python tests/fuzz/fuzz.py --target=NAME --input=FILE

Every target runs in a process of its own, with limits on memory, time per input and descriptors.
What it finds stays in the corpus for the next time; an input that breaks something is written to
the folder of the corpus, and `--input` runs it again. The report is merged into the output.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# Those of fuzz_targets.py, which must not be imported before atheris can instrument it.
TARGETS = (
    "archive",
    "mutated",
    "payload",
    "labels",
    "bundle",
    "label_files",
    "message",
    "manifest",
    "index",
    "receipt",
)
_SECONDS_PER_INPUT = 20
_MEMORY_MB = 2048
_DESCRIPTORS = 128
_MEASURED_OF = 16


def main() -> int:
    """Fuzzes the targets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=10_000, help="inputs per target")
    parser.add_argument("--max_len", type=int, default=8192, help="bytes of an input")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"))
    parser.add_argument("--output", type=Path, help="JSON file to which to add the results")
    parser.add_argument("--input", type=Path, help="run one input, without atheris")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.input:
        return _run_input(args.target[0], args.input)
    if args.child:
        return _fuzz(args)
    results = {}
    for target in args.target or TARGETS:
        results[target] = _run_child(target, args)
        print(f"{target}: {results[target]}", flush=True)
    if args.output:
        _add_report(args.output, results)
    return int(any(result["failed"] for result in results.values()))


def _run_input(target: str, path: Path) -> int:
    from fuzz_targets import TARGETS, check

    with tempfile.TemporaryDirectory() as folder:
        check(TARGETS[target], path.read_bytes(), Path(folder))
    print("nothing wrong")
    return 0


def _run_child(target: str, args: argparse.Namespace) -> dict[str, object]:
    """Runs, coverage and size of the corpus, from the last lines of libFuzzer."""
    command = [sys.executable, __file__, "--child", f"--target={target}", f"--runs={args.runs}"]
    command += [f"--max_len={args.max_len}", f"--seed={args.seed}", f"--corpus={args.corpus}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        print("\n".join(done.stderr.splitlines()[-60:]), file=sys.stderr)
    states = re.findall(r"#(\d+)\s.*?cov: (\d+) ft: (\d+) corp: (\d+)", done.stderr)
    runs, coverage, features, corpus = map(int, states[-1]) if states else (0, 0, 0, 0)
    return {
        "runs": runs,
        "coverage": coverage,
        "features": features,
        "corpus": corpus,
        "failed": done.returncode != 0,
    }


def _fuzz(args: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=["seqshard"]):
        from fuzz_seeds import seeds
        from fuzz_targets import TARGETS, check

    (name,) = args.target
    corpus = args.corpus / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(name)):
        (corpus / f"seed-{number:04d}").write_bytes(seed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    options = [
        f"-runs={args.runs}",
        f"-max_len={args.max_len}",
        f"-seed={args.seed}",
        f"-timeout={_SECONDS_PER_INPUT}",
        f"-rss_limit_mb={_MEMORY_MB}",
        f"-artifact_prefix={args.corpus}/{name}-",
        str(corpus),
    ]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        target, place = TARGETS[name], Path(folder)

        def run(data: bytes) -> None:
            check(target, data, place, measured=zlib.crc32(data) % _MEASURED_OF == 0)

        atheris.Setup([sys.argv[0], *options], run)
        atheris.Fuzz()
    return 0


def _add_report(path: Path, results: dict[str, dict[str, object]]) -> None:
    """Adds up the runs of each target, with the newest coverage."""
    sys.path.append(str(BENCHMARKS))
    from environment import environment

    report = json.loads(path.read_text()) if path.exists() else {}
    targets = report.get("targets", {})
    for name, result in results.items():
        before = targets.get(name, {}).get("runs", 0)
        targets[name] = {**result, "runs": before + int(result["runs"])}
    total = sum(target["runs"] for target in targets.values())
    report = {"total_runs": total, "targets": targets}
    report |= environment(["atheris", "numpy", "pyarrow", "msgspec"])
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
