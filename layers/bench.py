"""Layers beside their rivals, in one process and run.

    python -m eqxcute.layers.bench attention [--cases A1,A7] [--only eqxcute,cudnn] [--xla]
                                             [--rounds N] [--quick] [--no-backward] [--out FILE.json]
    python -m eqxcute.layers.bench attention --smoke      tiny, on any CPU: tests this program
    python -m eqxcute.layers.bench table FILE.json        the record's table, in Markdown
    python -m eqxcute.layers.bench readme FILE.json README.md
                                   rewrites what stands between `<!-- bench attention -->` and `<!-- /bench -->`
    python -m eqxcute.layers.bench tune attention [--dims 64,192/128] [--quick] [--out FILE.json]
                                   which configuration of a layer's kernels is the fastest on this GPU

Each layer that has a `_cases.py` is a command. A rival that is not installed, or fails, is named in
a line and left out. What each figure is:

- forward: a call of the jitted or compiled function, alone, without what is in `setup_ms`.
- backward: with torch the pullback alone, over and over on one graph. With JAX, which keeps no
  graph between calls, forward and backward in one jit, minus the forward.
- `setup_ms`: a rival's block mask, made before. Ours makes its tile map inside each call.
- `first_s`: the first call, compilation included, with whatever the caches on the disk hold.
- medians of rounds in which all take turns; a turn is some calls, queued without waiting.
- TFLOP/s: of the operations that the formula needs; see the layer's `_cases.py`.

Outputs and gradients of rivals are compared with ours: see `LIMIT`.
"""

import argparse
import datetime
import gc
import importlib
import importlib.metadata
import json
import os
import platform as machine
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax

from eqxcute import _arch
from eqxcute._fallback import platform

from ._timing import Contender, Run, brief, difference, first_call, take_turns

HERE: Final = Path(__file__).resolve().parent
LIMIT: Final = 0.02  # of relative difference: twice what bfloat16 leaves; a mask off by one is over
PACKAGES: Final = (
    *("jax", "jaxlib", "equinox", "eqxcute", "numpy", "nvidia-cutlass-dsl", "jax-tvm-ffi"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "torch", "triton", "flash-attn-4"),
    *("quack-kernels", "fa4-jax", "tokamax"),
)
CLOCKS: Final = ("clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.draw")
PASSES: Final = ("forward", "backward")
OURS: Final = "eqxcute"


def layers() -> list[str]:
    return sorted(path.parent.name for path in HERE.glob("*/_cases.py"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 2 where there is no NVIDIA GPU, 1 where ours failed."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    if args.command == "table":
        print(table(_read(args.record)))
        return 0
    if args.command == "readme":
        args.readme.write_text(rewritten(args.readme.read_text(), _read(args.record)))
        return 0
    if not args.smoke:
        # Several frameworks share the GPU: JAX may not take three quarters of it at the start.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # noqa: TID251  # set, not read
        if platform() != "cuda":
            print(
                f"bench {args.command} needs an NVIDIA GPU, and JAX runs on {platform()!r} here; "
                "--smoke tests the program without one, `table` and `readme` read a record.",
                file=sys.stderr,
            )
            return 2
    command = " ".join(("python -m eqxcute.layers.bench", *arguments))
    if args.command == "tune":
        return _tune(args, command)
    record = _measure(args, command)
    print("\n" + table(record))
    return int(_ours_failed(record))


def _ours_failed(record: dict[str, Any]) -> bool:
    troubled = {entry["implementation"] for entry in record["skipped"]}
    troubled |= {row["implementation"] for row in record["rows"] if row["note"]}
    return OURS in troubled


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eqxcute.layers.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for layer in layers():
        found = commands.add_parser(layer, help=f"time {layer}")
        found.add_argument("--cases", type=_names, help="such as A1,A7; default all")
        found.add_argument("--only", type=_names, help="implementations, such as eqxcute,cudnn")
        found.add_argument("--xla", action="store_true", help="plain JAX too, which is slow")
        found.add_argument("--rounds", type=int, default=11)
        found.add_argument("--turn-ms", type=float, default=30.0, help="how long a turn takes")
        found.add_argument("--backward", action=argparse.BooleanOptionalAction, default=True)
        found.add_argument("--quick", action="store_true", help="3 rounds of short turns")
        found.add_argument("--smoke", action="store_true", help="tiny shapes, without a GPU")
        found.add_argument("--seed", type=int, default=0)
        found.add_argument("--out", type=Path, help="the record, in JSON; written case by case")
        found.add_argument("--commit", help="of the source, where it is no git checkout")
    reading = commands.add_parser("table", help="print a record's table")
    writing = commands.add_parser("readme", help="put a record's table into a Markdown file")
    for some in (reading, writing):
        some.add_argument("record", type=Path)
    writing.add_argument("readme", type=Path)
    tuning = commands.add_parser("tune", help="find a layer's fastest configurations")
    tuning.add_argument("layer", choices=sorted(p.parent.name for p in HERE.glob("*/_tune.py")))
    tuning.add_argument("--dims", type=_dims, help="of heads, such as 64,192/128 (of q, of v)")
    tuning.add_argument("--quick", action="store_true", help="fewer candidates, and 3 rounds")
    tuning.add_argument("--rounds", type=int, default=5)
    tuning.add_argument("--turn-ms", type=float, default=10.0, help="how long a turn takes")
    tuning.add_argument("--smoke", action="store_true", help="tiny shapes, without a GPU")
    tuning.add_argument("--seed", type=int, default=0)
    tuning.add_argument("--out", type=Path, help="the record, in JSON")
    tuning.add_argument("--commit", help="of the source, where it is no git checkout")
    return parser


def _dims(text: str) -> list[tuple[int, int]]:
    """`64,192/128` -> 64 of q and of v, 192 of q with 128 of v."""
    found = []
    for name in _names(text):
        dim, _, v_dim = name.partition("/")
        found.append((int(dim), int(v_dim or dim)))
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# Measuring


def _measure(args: argparse.Namespace, command: str) -> dict[str, Any]:
    layer = importlib.import_module(f"{__package__}.{args.command}._cases")
    cases = _chosen("--cases", layer.CASES, args.cases)
    contenders = _chosen("--only", layer.CONTENDERS, args.only)
    if args.only is None:
        contenders = [c for c in contenders if not c.on_request or args.xla or args.smoke]
    if args.smoke:
        cases = [case.smoke() for case in cases]
        contenders = [c for c in contenders if c.anywhere]
        args.rounds, args.turn_ms = 2, 0.0
    elif args.quick:
        args.rounds, args.turn_ms = 3, 10.0
    record = _header(args, command, layer.INPUTS)
    record["contenders"] = [{"name": c.name, "title": c.title} for c in contenders]
    print(_who(record), flush=True)
    print(
        "backward: with torch the pullback alone; with JAX forward and backward minus forward",
        flush=True,
    )
    loaded = _load(contenders, record)
    for case in cases:
        print(f"\n{case.name}: {case.title}", flush=True)
        work = {one: case.flops(one == "backward") for one in PASSES}
        record["cases"].append({**case.facts(), "flops": work})
        _measure_case(
            layer, case, [c for c in contenders if c.name in loaded], loaded, args, record
        )
        record["clocks"].append({"when": f"after {case.name}", **clocks()})
        print(f"  clocks: {_clock(record['clocks'][-1])}", flush=True)
        if args.out is not None:  # after each case, so that a run that dies leaves what it has
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def _tune(args: argparse.Namespace, command: str) -> int:
    """The exit code: 2 on another GPU than the kernels are for, 1 where a case has no figures."""
    layer = importlib.import_module(f"{__package__}.{args.layer}._tune")
    if not args.smoke and _arch.current() != layer.ARCHITECTURE:
        print(
            f"bench tune {args.layer} is for {layer.ARCHITECTURE}, and this GPU is {_arch.current()}.",
            file=sys.stderr,
        )
        return 2
    args.dims = args.dims or _dims(layer.DIMS)
    layer.check(args.dims)
    if args.smoke or args.quick:
        args.rounds, args.turn_ms = (2, 0.0) if args.smoke else (3, 10.0)
    record = {**_origin(args, command, layer.INPUTS), "skipped": [], "entries": []}
    print(_who(record), flush=True)
    whole = layer.tune(args, record)
    record["clocks"].append({"when": "after", **clocks()})
    print(f"clocks: {_clock(record['clocks'][-1])}", flush=True)
    if args.out is not None:
        args.out.write_text(_written(record))
    return int(not whole)


def _written(record: dict[str, Any]) -> str:
    """JSON, a line an entry."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in record["entries"])
    head = json.dumps({**record, "entries": []}, indent=1).removesuffix("[]\n}")
    return f"{head}[\n{lines}\n ]\n}}\n"


def _chosen(option: str, known: Sequence[Any], wanted: list[str] | None) -> list[Any]:
    if wanted is None:
        return list(known)
    names = [one.name for one in known]
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise SystemExit(f"{option}: {', '.join(unknown)} is not one of {', '.join(names)}.")
    return [one for one in known if one.name in wanted]


def _load(contenders: list[Contender], record: dict[str, Any]) -> dict[str, Any]:
    loaded = {}
    for contender in contenders:
        try:
            loaded[contender.name] = contender.load()
        except ImportError as error:
            _skip(record, None, contender.name, f"not installed ({brief(error)})")
        except Exception as error:  # noqa: BLE001  # a rival that fails is a line, not the end
            _skip(record, None, contender.name, brief(error))
    return loaded


def _skip(record: dict[str, Any], case: str | None, name: str, reason: str) -> None:
    record["skipped"].append({"case": case, "implementation": name, "reason": reason})
    print(f"  {name:12} skipped: {reason}", flush=True)


def _measure_case(layer, case, contenders, loaded, args, record) -> None:
    inputs = layer.make_inputs(case, args.seed)
    runs: dict[str, Run] = {}
    rows: dict[str, dict[str, Any]] = {}
    ours = None
    for contender in contenders:
        name = contender.name
        if not contender.can(case):
            continue
        try:
            run = contender.prepare(loaded[name], case, inputs, args.smoke)
            row = _first(run, args.backward)
            results = run.results("backward" in row["first_s"])
            if ours is None:
                ours = results
            row["difference"] = difference(results, ours)
            del results
        except Exception as error:  # noqa: BLE001  # a rival that fails is a line, not the end
            _skip(record, case.name, name, brief(error))
            continue
        runs[name], rows[name] = run, {"case": case.name, "implementation": name, **row}
    passes = {name: tuple(rows[name]["first_s"]) for name in runs}
    del inputs, ours
    samples, failed = take_turns(runs, rounds=args.rounds, turn_ms=args.turn_ms, passes=passes)
    for name, reason in failed.items():
        _skip(record, case.name, name, reason)
    for name, found in samples.items():
        row = _figures(rows[name], found, runs[name].pullback_alone, case)
        record["rows"].append(row)
        print(_line(row), flush=True)
    runs.clear()
    gc.collect()  # torch's graphs hold arrays of gigabytes, in cycles


def _first(run: Run, backward: bool) -> dict[str, Any]:
    """The first calls. A backward pass that fails is a note, and the forward pass still counts."""
    row: dict[str, Any] = {"setup_ms": run.setup_ms, "note": None}
    row["first_s"] = {"forward": first_call(run.forward, run.wait)}
    if backward:
        try:
            row["first_s"]["backward"] = first_call(run.backward, run.wait)
        except Exception as error:  # noqa: BLE001  # see above
            row["note"] = f"no backward pass: {brief(error)}"
    return row


def _figures(row, samples: dict[str, list[float]], pullback_alone: bool, case) -> dict[str, Any]:
    medians = {one: statistics.median(found) for one, found in samples.items()}
    backward = medians.get("backward")
    if backward is not None and not pullback_alone:
        backward -= medians["forward"]
    times = {"forward": medians["forward"], "backward": backward}
    tflops = {
        one: None if ms is None or ms <= 0 else case.flops(one == "backward") / ms / 1e9
        for one, ms in times.items()
    }
    return {
        **row,
        "forward_ms": times["forward"],
        "backward_ms": times["backward"],
        "tflops": tflops,
        "backward_is": "pullback" if pullback_alone else "forward+backward minus forward",
        # As measured: of JAX, "backward" is forward and backward together.
        "samples_ms": samples,
    }


def _line(row: dict[str, Any]) -> str:
    parts = [f"  {row['implementation']:12}"]
    for one in PASSES:
        ms, rate = row[f"{one}_ms"], row["tflops"][one]
        if ms is None or rate is None:
            parts.append(f"{one} none")
            continue
        low, high = min(row["samples_ms"][one]), max(row["samples_ms"][one])
        parts.append(f"{one} {ms:8.3f} ms {_rate(rate):>5} TFLOP/s")
        both = one == "backward" and row["backward_is"] != "pullback"
        parts.append(f"(rounds {low:.3f} to {high:.3f}{', with forward' if both else ''})")
    parts.append(f"first {sum(row['first_s'].values()):.1f} s")
    if row["setup_ms"] is not None:
        parts.append(f"setup {row['setup_ms']:.2f} ms")
    if row["difference"] > LIMIT:
        parts.append(f"DIFFERS by {row['difference']:.2g}")
    if row["note"]:
        parts.append(row["note"])
    return "  ".join(parts)


# What it was measured on


def _header(args: argparse.Namespace, command: str, inputs: dict[str, str]) -> dict[str, Any]:
    lists = {name: [] for name in ("contenders", "cases", "rows", "skipped")}
    return {**_origin(args, command, inputs), **lists}


def _origin(args: argparse.Namespace, command: str, inputs: dict[str, str]) -> dict[str, Any]:
    device = jax.devices()[0]
    asked = _nvidia_smi(("name", "driver_version"))
    return {
        "benchmark": args.command,
        "smoke": args.smoke,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": {
            "name": asked.get("name", device.device_kind),
            "driver": asked.get("driver_version"),
            "platform": platform(),
        },
        "versions": {"python": machine.python_version(), **_versions()},
        **_commit(args.commit),
        "inputs": {**inputs, "seed": args.seed},
        "rounds": args.rounds,
        "turn_ms": args.turn_ms,
        "clocks": [{"when": "before", **clocks()}],
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit(named: str | None) -> dict[str, Any]:
    if named is not None:
        return {"commit": named, "changed": None}
    commit = _run("git", "-C", str(HERE), "rev-parse", "HEAD")
    changes = _run("git", "-C", str(HERE), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else bool(changes)}


def _nvidia_smi(fields: Sequence[str]) -> dict[str, str]:
    """Of the first GPU it lists; empty where it is not there, or knows a field not."""
    said = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if not said:
        return {}
    return dict(zip(fields, (x.strip() for x in said.splitlines()[0].split(",")), strict=False))


def clocks() -> dict[str, str]:
    """Clocks in MHz, degrees, watts, and why the clock is held down (0: it is not)."""
    reasons = "clocks_event_reasons.active"
    return _nvidia_smi((*CLOCKS, reasons)) or _nvidia_smi(CLOCKS)


def _clock(found: dict[str, str]) -> str:
    if "clocks.sm" not in found:
        return "not known (no nvidia-smi)"
    text = (
        f"SM {found['clocks.sm']} of {found['clocks.max.sm']} MHz, memory {found['clocks.mem']} MHz"
    )
    text += f", {found['temperature.gpu']} C, {found['power.draw']} W"
    reasons = found.get("clocks_event_reasons.active")
    return text + (f", event reasons {reasons}" if reasons else "")


# The table


def _who(record: dict[str, Any]) -> str:
    """The line under a table: what the figures hang on."""
    versions, device = record["versions"], record["device"]
    parts = [device["name"] + (f", driver {device['driver']}" if device["driver"] else "")]
    commit = record["commit"] or "unknown"
    state = " with changes" if record["changed"] else ""
    parts.append(f"eqxcute {versions.get('eqxcute')}, commit {commit[:12]}{state}")
    named = {"jax": "JAX", "nvidia-cutlass-dsl": "CuTe DSL"}
    shown = ("jax", "nvidia-cutlass-dsl", "torch", "flash-attn-4", "fa4-jax", "tokamax")
    cudnn = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
    parts += [f"{named.get(n, n)} {versions[n]}" for n in (*shown, *cudnn) if n in versions]
    parts.append(f"{record['inputs']['dtype']}, {record['date'][:10]}")
    speeds = [c["clocks.sm"] for c in record["clocks"][1:] if "clocks.sm" in c]
    if speeds:
        low, high = min(speeds, key=float), max(speeds, key=float)
        parts.append(f"SM clock after each case {low} to {high} MHz")
    return "; ".join(parts)


def _rate(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 9.5 else f"{tflops:.2g}"


def table(record: dict[str, Any]) -> str:
    """A record as Markdown: TFLOP/s, the best of a case in bold."""
    rows = {(row["case"], row["implementation"]): row for row in record["rows"]}
    shown = [c for c in record["contenders"] if any(name == c["name"] for _, name in rows)]
    lines = ["| | " + " | ".join(c["title"] for c in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for case in record["cases"]:
        found = [rows.get((case["name"], c["name"])) for c in shown]
        best = {
            one: max((row["tflops"][one] or 0.0 for row in found if row), default=0.0)
            for one in PASSES
        }
        cells = ["-" if row is None else _cell(row, best) for row in found]
        lines.append(f"| {case['name']}: {case['title']} | " + " | ".join(cells) + " |")
    note = (
        f"TFLOP/s, forward / backward; medians of {record['rounds']} rounds in turn. {_who(record)}. "
        "Backward is the pullback alone with torch, forward and backward minus forward with JAX. `+` is time to "
        "make a block mask, which is not in the figure; ours makes its tile map in each call."
    )
    if record["smoke"]:
        note = "A trial of the program at tiny sizes: the figures mean nothing. " + note
    if any(row["difference"] > LIMIT for row in record["rows"]):
        note += " (!): the result differs from the first column's."
    return "\n".join((*lines, "", note))


def _cell(row: dict[str, Any], best: Mapping[str, float]) -> str:
    rates = []
    for one in PASSES:
        rate = row["tflops"][one]
        bold = "**" if rate is not None and rate == best[one] else ""
        rates.append("-" if rate is None else f"{bold}{_rate(rate)}{bold}")
    setup = "" if row["setup_ms"] is None else f" + {row['setup_ms']:.2g} ms"
    return " / ".join(rates) + setup + (" (!)" if row["difference"] > LIMIT else "")


def rewritten(text: str, record: dict[str, Any]) -> str:
    """`text` with the record's table between the markers of its benchmark."""
    start, end = f"<!-- bench {record['benchmark']} -->", "<!-- /bench -->"
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"readme: the file has no {start} followed by {end}.")
    if record["smoke"]:
        raise SystemExit("readme: this record is of --smoke, whose figures mean nothing.")
    return f"{before}{start}\n{table(record)}\n{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
