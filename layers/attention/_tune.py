"""What `python -m eqxcute.layers.bench tune attention` measures: configurations of Hopper's kernels.

Cases are pairs of dims, with and without a mask (causal, with its tile map), with and without a score function (a soft-cap:
what serves it has registers to spare), forward and backward. The candidates of a case are the static table's configuration,
and around it, field by field in turn, the nearest that has another value there and fits shared memory and registers.

They are compiled by processes beside this one, which leave them in the cache on the disk:
`python -m eqxcute.layers.attention._tune JOBS` reads numbers of jobs, and answers each with a line.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

import jax
import jax.numpy as jnp
import jax.random as jr

import eqxcute
from eqxcute._arch import ARCHITECTURES

from .._timing import brief, difference, first_call, take_turns
from . import _attend, _config
from ._compiled import Functions, compiled
from ._config import HOPPER, MAP_TILE, MapLayout, Sm90Forward
from ._functions import trace_mask, trace_score
from ._masks import CausalMask
from ._scores import SoftCap
from ._tiles import tile_map

INPUTS: Final = {
    "dtype": "bfloat16",
    "distribution": "standard normal, from jax.random.key(seed)",
    "shape": "2 x 8192, 16 heads",
    "sparse": "causal, and its tile map",
    "score": "soft-cap 20",
}
ARCHITECTURE: Final = HOPPER
DIMS: Final = "64,96,128,192/128"
CAP: Final = 20.0
LIMIT: Final = 0.02  # of relative difference: twice what bfloat16 leaves
GAIN: Final = 1.01  # by which another is faster than the static table's, to take its place
MOST, MOST_QUICK = 8, 4  # candidates of a case

# The values that are tried, and those fields first that say most. Of equally near values the first is taken.
FORWARD: Final[Mapping[str, tuple]] = {
    "tile_kv": (176, 160, 128, 96, 80, 64),
    "hidden": (0, 1, 2),
    "warpgroups": (2, 3),
    "stages": (2, 3, 4),
}
BACKWARD: Final[Mapping[str, tuple]] = {
    "tile_q": (64, 128),
    "hidden": (False, True),
    "ds_stages": (1, 2, 3),
    "stages": (2, 3),
}
STEPPED: Final = ("tile_kv", "stages", "ds_stages")  # of others any value is as far as any other
# Registers a thread for what it multiplies: of those it has, by computing warpgroups, what leaves room for the rest.
REGISTERS: Final[Mapping[int, int]] = {2: 208, 3: 128}


@dataclasses.dataclass(frozen=True)
class Case:
    direction: str  # "forward" or "backward"
    dim: int
    v_dim: int
    mask: str  # "full" or "sparse"
    score: bool

    @property
    def title(self) -> str:
        score = ", soft-cap" if self.score else ""
        return f"{self.direction} {self.dim}/{self.v_dim} {self.mask}{score}"


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int = 2
    length: int = 8192
    heads: int = 16


SMOKE: Final = Sizes(1, 32, 2)


def flops(case: Case, sizes: Sizes) -> int:
    """Of what the formula needs: two operations for each pair, and each number of a product's inner or outer dim."""
    n, d, e = sizes.length, case.dim, case.v_dim
    pairs = sizes.batch * sizes.heads * (n * n if case.mask == "full" else n * (n + 1) // 2)
    return 2 * pairs * (d + e if case.direction == "forward" else 3 * d + 2 * e)


# Candidates


def cases(dims: Sequence[tuple[int, int]]) -> list[Case]:
    """A backward case stands behind its forward case, whose output it needs."""
    kinds = itertools.product(dims, ("full", "sparse"), (False, True), ("forward", "backward"))
    found = [Case(direction, *dim, mask, score) for dim, mask, score, direction in kinds]
    return [case for case in found if static(case) is not None]


def static(case: Case) -> Any:
    """What the static table has. None where there is no kernel."""
    facts, dims = ARCHITECTURES[HOPPER], (case.dim, case.v_dim)
    if case.direction == "forward":
        return _config.hopper_forward_table(facts, *dims)
    return _config.hopper_backward_table(facts, *dims, _tile(case, None), scored=case.score)


def candidates(case: Case, most: int) -> list[Any]:
    """The static table's first."""
    base = static(case)
    fields = FORWARD if case.direction == "forward" else BACKWARD
    fields = {name: _with(values, getattr(base, name)) for name, values in fields.items()}
    space = [
        dataclasses.replace(base, **dict(zip(fields, values, strict=True)))
        for values in itertools.product(*fields.values())
    ]
    space = [config for config in space if fits(case, config)]
    others = [list(_others(base, name, fields, space)) for name in fields]
    turns = itertools.chain(*itertools.zip_longest(*others))
    found = dict.fromkeys((base, *(config for config in turns if config is not None)))
    return list(found)[:most]


def _with(values: tuple, value: Any) -> tuple:
    return values if value in values else (*values, value)


def _others(base: Any, name: str, fields: Mapping[str, tuple], space: list) -> Iterator[Any]:
    """For each other value of a field the nearest configuration that has it: the nearest first."""

    def far(config):
        steps = 0
        for field, values in fields.items():
            one, other = (values.index(getattr(x, field)) for x in (base, config))
            steps += abs(one - other) if field in STEPPED else one != other
        return steps

    nearest = {}
    for config in sorted(space, key=far):
        nearest.setdefault(getattr(config, name), config)
    nearest.pop(getattr(base, name), None)
    return iter(nearest.values())


def fits(case: Case, config: Any) -> bool:
    """Shared memory, registers, the map's tile, and what the kernel can do at all."""
    facts, dims = ARCHITECTURES[HOPPER], (case.dim, case.v_dim)
    d, e = (_config.tile_columns(dim, 16) for dim in dims)
    tile = _tile(case, config)
    if isinstance(config, Sm90Forward):
        held = config.tile_kv * 3 // 4 + e // 2
        return held <= REGISTERS[config.warpgroups] and _config.hopper_forward_fits(
            config, facts, *dims, tile
        )
    held = config.tile_q + (d + e) // 2
    return (
        config.ds_stages in (1, config.stages)
        and held <= REGISTERS[2]
        and _config.hopper_backward_fits(config, facts, *dims, tile)
    )


def _tile(case: Case, config: Any) -> tuple[int, int] | None:
    """Of the map that the kernel would be given."""
    if case.mask == "full":
        return None
    return _config.map_tile_of(config) if case.direction == "forward" else MAP_TILE


# Kernels and what they are called with


@functools.cache
def _functions(case: Case) -> Functions:
    mask = score = None
    if case.mask == "sparse":
        mask, _ = compiled(*trace_mask(CausalMask()))
    if case.score:
        score, _ = compiled(*trace_score(SoftCap(CAP), jnp.float32))
    found = Functions(mask, score)
    return found if case.direction == "forward" else found.differentiated()


def kernel_of(case: Case, config: Any) -> Callable:
    tile = _tile(case, config)
    layout = None if tile is None else MapLayout((), False, False, tile)
    common = {"precision": None, "scale": case.dim**-0.5, "config": config}
    if case.direction == "forward":
        return _attend.ForwardKernel(_functions(case), layout, **common)
    return _attend.BackwardKernel(_functions(case), layout, wanted=(), **common)


def arguments(case: Case, config: Any, sizes: Sizes, arrays: Sequence[Any]) -> tuple:
    """`arrays` are q, k, v, and backward out, lse, dout."""
    lists, tile = None, _tile(case, config)
    if tile is not None:
        found = tile_map(CausalMask(), sizes.length, sizes.length, tile=tile)
        lists = tuple(
            (x.tiles, x.partial, x.full, x.order) for x in (found.forward, found.backward)
        )
    rows = jnp.arange(sizes.batch, dtype=jnp.int32)[:, None]
    heads = jnp.arange(sizes.heads, dtype=jnp.int32)[:, None]
    more = () if case.direction == "forward" else (jnp.zeros_like(arrays[4]),)
    return (*arrays, *more, rows, heads, lists, (), ())


def inputs(case: Case, sizes: Sizes, seed: int) -> list[jax.Array]:
    """q, k, v and dout."""
    q, k = (sizes.batch, sizes.length, sizes.heads, 1), (sizes.batch, sizes.length, sizes.heads)
    shapes = ((*q, case.dim), (*k, case.dim), (*k, case.v_dim), (*q, case.v_dim))
    keys = jr.split(jr.key(seed), 4)
    return [jr.normal(key, size, jnp.bfloat16) for key, size in zip(keys, shapes, strict=True)]


# Compiling, in processes beside this one


@dataclasses.dataclass(frozen=True)
class Job:
    case: Case
    config: Any


def jobs(dims: Sequence[tuple[int, int]], most: int) -> list[Job]:
    return [Job(case, config) for case in cases(dims) for config in candidates(case, most)]


def lower(job: Job) -> None:
    """Compiles a kernel into the cache on the disk."""
    case, config, sizes = job.case, job.config, Sizes()
    q, k, v, dout = jax.eval_shape(lambda: inputs(case, sizes, 0))
    given = [q, k, v]
    if case.direction == "backward":
        lse = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, 1, sizes.length), jnp.float32)
        given += [dout, lse, dout]
    more = arguments(case, config, sizes, given)
    with eqxcute.architecture(HOPPER):
        jax.jit(kernel_of(case, config)).trace(*more).lower(lowering_platforms=("cuda",))


def work(given: list[Job]) -> None:
    """Of a process that compiles: a line with a number is a job, and is answered by what went wrong, in JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints is no answer
    for line in sys.stdin:
        try:
            lower(given[int(line)])
            said = None
        except Exception as error:  # noqa: BLE001  # a candidate that fails is a line, not the end
            said = brief(error)
        print(json.dumps(said), file=answers, flush=True)


class Compilers:
    """Some processes, each with one job at a time. One that dies is another one from then on."""

    def __init__(self, count: int, dims: Sequence[tuple[int, int]], most: int):
        self._command = [sys.executable, "-m", __name__, json.dumps([dims, most])]
        self._idle: queue.Queue[subprocess.Popen[str]] = queue.Queue()
        self._all: dict[subprocess.Popen[str], IO[str]] = {}  # and what they say
        self._closed = False
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}  # noqa: TID251  # handed on
        errors = tempfile.TemporaryFile("w+")
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env,
        )
        self._all[process] = errors
        self._idle.put(process)

    def compile(self, number: int) -> str | None:
        """What went wrong, of the job of that number."""
        process = self._idle.get()
        try:
            print(number, file=process.stdin, flush=True)
            answer = process.stdout.readline() if process.stdout else ""
        except OSError:
            answer = ""
        if self._closed:
            return "interrupted"
        if not answer:
            self._start()
            process.wait()
            errors = self._all[process]
            errors.seek(0)
            return f"its compiler died: {errors.read().strip()[-200:]}"
        self._idle.put(process)
        return json.loads(answer)

    def close(self) -> None:
        self._closed = True
        for process, errors in list(self._all.items()):
            process.kill()
            process.communicate()
            errors.close()


# Measuring


class Call:
    """A candidate with its inputs, ready to be called: see `take_turns`."""

    setup_ms: float | None = None
    pullback_alone = True

    def __init__(self, case: Case, config: Any, given: tuple):
        self._function, self._given = jax.jit(kernel_of(case, config)), given

    def forward(self) -> Any:
        return self._function(*self._given)

    def backward(self) -> Any:
        raise NotImplementedError

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def results(self, backward: bool) -> list[jax.Array]:
        return jax.tree.leaves(self.forward())


def check(dims: Sequence[tuple[int, int]]) -> None:
    """An entry is for whole columns of shared memory."""
    for pair in dims:
        columns = tuple(_config.tile_columns(dim, 16) for dim in pair)
        if pair != columns:
            raise SystemExit(f"--dims: {pair} is worked on as {columns}: name those.")
        if static(Case("forward", *pair, "full", False)) is None:
            raise SystemExit(f"--dims: there is no kernel of {HOPPER} for {pair}.")


def tune(args: argparse.Namespace, record: dict[str, Any]) -> bool:
    """Fills `entries` and `skipped` of the record. Whether each case has an entry."""
    sizes = SMOKE if args.smoke else Sizes()
    most = 2 if args.smoke else MOST_QUICK if args.quick else MOST
    given = jobs(args.dims, most)
    count = 0 if args.smoke else min(len(given), max(1, len(os.sched_getaffinity(0)) - 1))
    print(f"{len(given)} kernels, compiled by {count} processes", flush=True)
    compilers = Compilers(count, args.dims, most)
    with concurrent.futures.ThreadPoolExecutor(max(1, count)) as pool:
        done = {
            job: pool.submit(compilers.compile, number) if count else None
            for number, job in enumerate(given)
        }
        try:
            ready = _prepared(done, sizes, args.seed, record)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.close()
    for case, calls in ready.items():
        record["entries"] += _measured(case, calls, sizes, args, record)
    return len(record["entries"]) == len(cases(args.dims))


def _skip(record: dict[str, Any], case: Case, config: Any, reason: str) -> None:
    record["skipped"].append({"case": case.title, "config": tried(config), "reason": reason})
    print(f"  {case.title}: {_words(config)} skipped: {reason}", flush=True)


def tried(config: Any) -> dict[str, Any]:
    """The fields in which candidates differ."""
    fields = FORWARD if isinstance(config, Sm90Forward) else BACKWARD
    return {name: getattr(config, name) for name in fields}


def _words(config: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in tried(config).items())


def _prepared(
    done: Mapping[Job, Any], sizes: Sizes, seed: int, record: dict[str, Any]
) -> dict[Case, dict[Any, Call]]:
    """Each candidate called once, while others are compiled; without those that fail, or differ from the first."""
    ready: dict[Case, dict[Any, Call]] = {}
    outputs: dict[Case, Any] = {}  # of forward cases
    wanted: dict[Case, Any] = {}  # a case's first result
    for job, compiling in done.items():
        case, config = job.case, job.config
        try:
            trouble = None if compiling is None else compiling.result()
            if trouble is not None:
                raise RuntimeError(trouble)
            call = Call(case, config, _given(case, config, sizes, seed, outputs))
            first_call(call.forward, call.wait)
            results = call.results(False)
            off = difference(results, wanted.setdefault(case, results))
            if not off <= LIMIT:
                raise ValueError(f"its result is off the first one's by {off:.2g}")
        except Exception as error:  # noqa: BLE001  # a candidate that fails is a line, not the end
            _skip(record, case, config, brief(error))
            continue
        if case.direction == "forward":
            outputs.setdefault(case, results)
        ready.setdefault(case, {})[config] = call
    return ready


def _given(case: Case, config: Any, sizes: Sizes, seed: int, outputs: Mapping[Case, Any]) -> tuple:
    arrays = _inputs(
        dataclasses.replace(case, direction="forward", mask="", score=False), sizes, seed
    )
    given = arrays[:3]
    if case.direction == "backward":
        out, lse = outputs[dataclasses.replace(case, direction="forward")]
        given = [*given, out, lse, arrays[3]]
    return arguments(case, config, sizes, given)


_inputs = functools.lru_cache(maxsize=2)(inputs)


def _measured(
    case: Case, calls: dict[Any, Call], sizes: Sizes, args: argparse.Namespace, record
) -> list[dict[str, Any]]:
    """The entry of a case."""
    names = {_words(config): config for config in calls}
    runs = {name: calls[config] for name, config in names.items()}
    passes = dict.fromkeys(runs, ("forward",))
    samples, failed = take_turns(runs, rounds=args.rounds, turn_ms=args.turn_ms, passes=passes)
    for name, reason in failed.items():
        _skip(record, case, names[name], reason)
    times = {names[name]: statistics.median(x["forward"]) for name, x in samples.items()}
    if not times:
        return []
    best = chosen(times, static(case))
    rate = flops(case, sizes) / times[best] / 1e9
    print(f"{case.title}: {_words(best)}: {times[best]:.3f} ms, {rate:.0f} TFLOP/s", flush=True)
    ordered = sorted(times.items(), key=lambda pair: pair[1])
    for config, ms in ordered:
        print(f"  {ms:8.3f} ms  {_words(config)}", flush=True)
    entry = {
        **dataclasses.asdict(case),
        "config": dataclasses.asdict(best),
        "ms": round(times[best], 4),
        "tflops": round(rate, 1),
        "candidates": [[tried(config), round(ms, 4)] for config, ms in ordered],
    }
    return [entry]


def chosen(times: Mapping[Any, float], base: Any) -> Any:
    """The fastest, unless the static table's is as good as it."""
    best = min(times, key=lambda config: times[config])
    return base if base in times and times[base] <= GAIN * times[best] else best


if __name__ == "__main__":
    work(jobs(*json.loads(sys.argv[1])))
