"""Kernels through the compiler, on a machine without a GPU: what is compiled, how often, and under which name."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import bridge_cases
import bridge_kernels
import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bridge_kernels import AnyTree, Copy, LookUp, Reverse, RowSum, Saxpy, ScaleBy, Table

import eqxcute
from eqxcute import CompileTimeout, SlowPathWarning, testing

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
X = bridge_cases.normal(77)


def lowered(function, *arguments, architecture="sm_90a") -> str:
    """The HLO of `function` for CUDA."""
    with eqxcute.architecture(architecture):
        traced = jax.jit(lambda *some: function(*some)).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def compiles(function) -> int:
    before = testing.compile_count()
    function()
    return testing.compile_count() - before


@pytest.mark.parametrize(("kernel", "arguments"), bridge_cases.cases())
def test_interpreted_a_kernel_gives_what_its_reference_gives(kernel, arguments):
    """The bridge whole, but for XLA: arguments, outputs, attributes, aliases, workspace, layouts, in the right places."""
    testing.check_kernel(kernel, *arguments, gradients=False, interpreted=True)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(x, marks=[pytest.mark.slow] * (x != "sm_90a")) for x in ARCHITECTURES],
)
def test_every_feature_compiles_for_every_architecture(architecture):
    for case in bridge_cases.cases():
        kernel, arguments = case.values
        if not case.id.startswith(
            "copy float8"
        ):  # no conversion on sm_80: loads and stores only, tried above
            compiled = testing.compile_only(kernel, *arguments, architecture=architecture)
            assert f".target {architecture}" in compiled.ptx
            assert compiled.cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_64_bit_dtypes(dtype):
    with jax.enable_x64(True):
        x = (jnp.arange(70) * 2**33).astype(dtype)
        np.testing.assert_array_equal(testing.interpret(Copy(), x), x)


def test_every_architecture_that_is_offered_compiles():
    from eqxcute._arch import ARCHITECTURES as offered

    for name in offered:
        assert f".target {name}" in testing.compile_only(Copy(), X, architecture=name).ptx


# The HLO.


def test_a_call_is_a_short_custom_call():
    text = lowered(Saxpy(2.0), X, X)
    assert len(text) <= 700
    assert text.count("stablehlo.custom_call @eqxcute.saxpy.") == 1
    assert "beta = 1.000000e+00 : f32" in text
    # an array whose bytes are a multiple of 128 is kept from being passed as a slice of another
    whole = lowered(Saxpy(2.0), X[:64], X[:64])
    assert len(whole) <= 760
    assert whole.count("optimization_barrier") == 2
    assert "optimization_barrier" not in text


def test_equal_layers_are_one_kernel():
    """K01: 12 equal layers in one jit."""
    kernels = [Saxpy(41.0) for _ in range(12)]

    def layers(x):
        for kernel in kernels:
            x = kernel(x, x)
        return x

    texts = []
    assert compiles(lambda: texts.append(lowered(layers, X))) == 1
    assert compiles(lambda: texts.append(lowered(layers, X))) == 0
    names = {word for word in texts[0].split() if word.startswith("@eqxcute.")}
    assert len({name.split("(")[0] for name in names}) == 1


def test_what_recompiles_and_what_does_not():
    lowered(Saxpy(42.0), X, X)
    assert compiles(lambda: lowered(Saxpy(42.0, 7.0), X, X)) == 0  # an attribute
    assert compiles(lambda: lowered(Saxpy(42.0), X[:5], X[:5])) == 0  # a size
    assert compiles(lambda: lowered(jax.vmap(RowSum()), jnp.ones((2, 3, 44)))) == 1
    assert compiles(lambda: lowered(RowSum(), jnp.ones((9, 8, 7, 44)))) == 0  # leading dims
    assert compiles(lambda: lowered(RowSum(), jnp.ones((9, 48)))) == 1  # a dim marked `!`
    assert compiles(lambda: lowered(Saxpy(43.0), X, X)) == 1  # a static field
    half = X.astype("float16")
    assert compiles(lambda: lowered(Saxpy(42.0), half, half)) == 1  # a dtype
    assert compiles(lambda: lowered(Saxpy(42.0), X, X, architecture="sm_80")) == 1
    scale = jnp.float32(2)
    assert (
        compiles(lambda: [lowered(ScaleBy(), X, s) for s in (scale, 3 * scale)]) == 1
    )  # a 0-d array: only the kernel
    table = Table(bridge_cases.normal(7), 44.0)
    index = jnp.arange(3)
    assert (
        compiles(lambda: [lowered(LookUp(Table(table.values * i, 44.0)), index) for i in range(3)])
        == 1
    )


@pytest.mark.slow
def test_1100_kernels_with_equal_static_parts_are_one():
    """K06: jax-tvm-ffi has 1,024 places; kernels that differ in attributes, sizes or arrays share one."""

    def many():
        for i in range(1100):
            kernel = Saxpy(45.0, float(i))
            operands, call = eqxcute._primitive.flatten(kernel, (X[: 1 + i % 70], X[: 1 + i % 70]))
            found = eqxcute._primitive.view_of(call, operands)
            targets.add(eqxcute._registry.target(found, eqxcute._primitive.plan_of(found)))

    import eqxcute._registry

    targets = set()
    with eqxcute.architecture("sm_90a"):
        assert compiles(many) == 1
    assert len(targets) == 1


def test_the_1025th_kernel_says_what_makes_kernels_differ(monkeypatch):
    import jax_tvm_ffi

    lowered(Saxpy(46.0), X, X)
    monkeypatch.setattr(jax_tvm_ffi, "registered_count", lambda: 1024)
    lowered(Saxpy(46.0), X, X)  # known: needs no place
    with pytest.raises(
        eqxcute.CompileError, match=r"1025th kernel.*1024 places.*attribute\(\)"
    ) as caught:
        lowered(Saxpy(47.0), X, X)
    assert "`Saxpy`" in str(caught.value)


def test_threads_compile_an_equal_kernel_once():
    errors = []

    def lower():
        try:
            lowered(Saxpy(48.0), X, X)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=lower) for _ in range(4)]

    def run():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert compiles(run) == 1
    assert not errors


# Architectures.


def test_an_architecture_is_never_guessed(monkeypatch):
    monkeypatch.delenv("EQXCUTE_ARCH", raising=False)
    traced = jax.jit(Saxpy(2.0)).trace(X, X)
    if not any(d.platform == "gpu" for d in jax.devices()):
        with pytest.raises(
            eqxcute.ArchitectureError, match=r"eqxcute.architecture\(\"sm_90a\"\).*EQXCUTE_ARCH"
        ):
            traced.lower(lowering_platforms=("cuda",))
    monkeypatch.setenv("EQXCUTE_ARCH", "sm_120a")
    traced.lower(lowering_platforms=("cuda",))
    monkeypatch.setenv("EQXCUTE_ARCH", "sm_75")
    with pytest.raises(eqxcute.ArchitectureError, match=r"'sm_75'.*sm_80"):
        jax.jit(Saxpy(2.0)).trace(X[:3], X[:3]).lower(lowering_platforms=("cuda",))
    with pytest.raises(eqxcute.ArchitectureError, match="'hopper'"), eqxcute.architecture("hopper"):
        pass


def test_each_architecture_has_its_own_target():
    jitted = jax.jit(Saxpy(2.0))
    texts = set()
    for name in ("sm_80", "sm_90a"):
        with eqxcute.architecture(name):
            texts.add(jitted.trace(X, X).lower(lowering_platforms=("cuda",)).as_text())
    assert len(texts) == 2


# What the compiler makes of it.


def test_offsets_are_64_bit_where_they_may_pass_2_31():
    """L05: the inner size is baked in, so that CuTe alone would compute row offsets in 32 bits, and wrap."""
    ptx = testing.compile_only(RowSum(), jnp.ones((4, 1024), jnp.bfloat16)).ptx
    row = [
        line
        for line in ptx.splitlines()
        if "mul.lo.s64" in line or "mad.lo.s64" in line or "shl.b64" in line
    ]
    assert row, "no 64-bit row offset"
    assert "mul.lo.s32" not in ptx
    assert "shl.b32 \t%r" not in "".join(line for line in ptx.splitlines() if "1024" in line)


def test_cond_is_a_branch_that_reads_nothing_it_should_not():
    table = Table(bridge_cases.normal(7), 3.0)
    index = jnp.array([-1, 0, 6, 7, 2**31 - 1, -(2**31)], jnp.int32)
    got = testing.interpret(LookUp(table), index)  # an access outside `values` would be a fault
    np.testing.assert_allclose(
        got, [0, 3 * table.values[0], 3 * table.values[6], 0, 0, 0], rtol=1e-6
    )


class Conds(eqxcute.Kernel):
    """`cond` with a tuple, with nothing, nested, and with a Python bool."""

    signature = "n -> n"
    double: bool = eqxcute.static()

    def reference(self, x):
        return jnp.where(x > 0, (2 if self.double else 1) * x, jnp.where(x < -1, -1.0, 5.0))

    @cute.jit
    def launch(self, stream, x, out):
        bridge_kernels.cover(x.shape[0], self.kernel(x, out), stream)

    @cute.kernel
    def kernel(self, x, out):
        self.work(x, out, bridge_kernels.index())

    def work(self, x, out, i):
        def inside():
            value = x[i]
            first, times = eqxcute.cond(
                value > 0.0,
                lambda: (value, cutlass.Int32(1)),
                lambda: (
                    eqxcute.cond(
                        value < -1.0, lambda: cutlass.Float32(-1.0), lambda: cutlass.Float32(5.0)
                    ),
                    cutlass.Int32(0),
                ),
            )
            factor = eqxcute.cond(self.double, lambda: 2.0, lambda: 1.0)
            out[i] = eqxcute.cond(times == 1, lambda: first * factor, lambda: first)

        eqxcute.cond(i < x.shape[0], inside, lambda: None)


@pytest.mark.parametrize("double", [True, False])
def test_cond(double):
    testing.check_kernel(Conds(double), bridge_cases.normal(77), gradients=False, interpreted=True)


class Endless(eqxcute.Kernel):
    """A plain Python loop over a run-time tensor: it never ends."""

    signature = "n -> n"

    def launch(self, stream, x, out):
        total = 0
        while True:
            for value in (x[0],):
                total = total + value


def test_a_runaway_trace_ends_and_the_next_kernel_compiles(monkeypatch):
    monkeypatch.setenv("EQXCUTE_COMPILE_TIMEOUT", "1.5")
    with pytest.raises(CompileTimeout, match=r"`Endless`.*1.5 s.*EQXCUTE_COMPILE_TIMEOUT"):
        lowered(Endless(), X)
    monkeypatch.delenv("EQXCUTE_COMPILE_TIMEOUT")
    assert compiles(lambda: lowered(Saxpy(49.0), X, X)) == 1

    failures = []

    def in_a_thread():
        try:
            lowered(Endless(), X)
        except CompileTimeout as error:
            failures.append(error)

    monkeypatch.setenv("EQXCUTE_COMPILE_TIMEOUT", "1")
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert len(failures) == 1


class Sleepy(eqxcute.Kernel):
    """Waits in C, where no exception arrives."""

    signature = "n -> n"

    def launch(self, stream, x, out):
        time.sleep(4)


def test_a_trace_that_does_not_stop_is_left_behind(monkeypatch):
    from eqxcute import _compile

    monkeypatch.setattr(_compile, "_STOP_SECONDS", 0.5)
    monkeypatch.setenv("EQXCUTE_COMPILE_TIMEOUT", "0.5")
    with pytest.raises(CompileTimeout, match="`Sleepy`"):
        lowered(Sleepy(), X)
    monkeypatch.delenv("EQXCUTE_COMPILE_TIMEOUT")
    with pytest.raises(eqxcute.CompileError, match=r"has not stopped.*Restart"):
        lowered(Saxpy(51.0), X, X)
    for thread in _compile._abandoned:
        thread.join()
    assert compiles(lambda: lowered(Saxpy(51.0), X, X)) == 1


def test_no_launch_is_named():
    class Bare(eqxcute.Kernel):
        signature = "n -> n"

        def reference(self, x):
            return x

    with pytest.raises(eqxcute.BackendError, match="`Bare` has no `launch`"):
        lowered(Bare(), X)


def test_a_baked_in_size_of_zero():
    assert testing.interpret(RowSum(), jnp.ones((3, 0))).tolist() == [0, 0, 0]


def test_symbolic_sizes_for_cuda_are_refused():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(eqxcute.SpecError, match=r"`x` has the symbolic size n.*once a size"):
        lowered(Saxpy(2.0), *[jax.ShapeDtypeStruct((n,), jnp.float32)] * 2)


def test_an_initial_value_that_does_not_fit_is_refused():
    class Odd(bridge_kernels.Histogram):
        initial = {"counts": 0.5}

    with pytest.raises(eqxcute.SpecError, match=r"`counts` is int32, which does not hold 0\.5"):
        lowered(Odd(5), jnp.arange(3))


def test_an_alias_of_an_argument_that_is_none_does_nothing():
    class Optional(bridge_kernels.Accumulate):
        aliases = {"state.m": "out", "state.v": "out"}

    lowered(Optional(), bridge_kernels.State(X, None), X)
    with pytest.raises(eqxcute.SpecError, match="name the same output"):
        lowered(Optional(), bridge_kernels.State(X, X), X)


class Broken(eqxcute.Kernel):
    signature = "n -> n"

    @cute.jit
    def launch(self, stream, x, out):
        bridge_kernels.cover(x.shape[0], self.kernel(x, out), stream)

    @cute.kernel
    def kernel(self, x, out):
        out[0] = x.no_such_thing


def test_a_compile_error_names_the_kernel_and_keeps_the_compilers_own():
    with pytest.raises(
        eqxcute.CompileError, match=r"(?s)`Broken` does not compile for sm_90a.*no_such_thing"
    ) as caught:
        lowered(Broken(), X)
    assert caught.value.__cause__ is not None
    lowered(Saxpy(2.0), X, X)


def test_vmap_over_what_cannot_grow_warns_when_lowered():
    x = bridge_cases.normal(4, 77)
    with pytest.warns(
        SlowPathWarning, match=r"`Reverse`.*batch axis of x.*launched 4 times.*`Kernel.batch`"
    ):
        text = lowered(jax.vmap(Reverse()), x)
    assert "while" in text


def test_empty_outputs_launch_nothing():
    assert "custom_call" not in lowered(Saxpy(2.0), X[:0], X[:0])


def test_a_dim_over_2_31_is_refused():
    huge = jax.ShapeDtypeStruct((2**31,), jnp.int8)
    with pytest.raises(eqxcute.SpecError, match=r"`x` has a dim of 2147483648.*Split"):
        lowered(Copy(), huge)
    assert "custom_call" in lowered(Copy(), jax.ShapeDtypeStruct((2**31 - 1,), jnp.int8))


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("aliases", {"y.z": "out"}, r"'y.z' names no array.*0 or 'x', 1 or 'y'"),
        ("aliases", {3: 0}, "3 names no array"),
        ("aliases", {"x": "out", "y": "out"}, "name the same output"),
        ("initial", {"o": 0}, r"'o' names no array.*0 or 'out'"),
        ("layouts", {"x": (1, 0)}, r"layouts\['x'\] = \(1, 0\)"),
    ],
)
def test_class_options_that_fit_nothing_are_refused(option, value, part):
    cls = type("Odd", (Saxpy,), {option: value, "__module__": __name__, "__annotations__": {}})
    with pytest.raises(eqxcute.SpecError, match=part):
        lowered(cls(2.0), X, X)


def test_an_alias_of_another_dtype_is_refused():
    class Odd(ScaleBy):
        aliases = {"scale": "out"}

    with pytest.raises(eqxcute.SpecError, match=r"`out` cannot take over the buffer of `scale`"):
        lowered(Odd(), X, jnp.float32(1))


def test_side_effects_are_kept():
    class Kept(Copy):
        side_effect = True

    def ignore(kernel):
        return lambda x: (kernel(x), x)[1]

    assert "custom_call" in lowered(ignore(Kept()), X)
    assert "custom_call" not in lowered(ignore(Copy()), X)


def test_pairs_of_jax_and_jax_tvm_ffi_that_cannot_work_are_refused(monkeypatch):
    from eqxcute import _registry

    versions = {"nvidia-cutlass-dsl": (4, 8, 1), "jax": (0, 8, 2), "jax-tvm-ffi": (0, 1, 3)}
    monkeypatch.setattr(_registry, "_version", versions.get)
    with pytest.raises(
        eqxcute.BackendError, match=r"jax 0.8.2 .*jax-tvm-ffi 0.1.3.*jax-tvm-ffi==0.1.2"
    ):
        lowered(Saxpy(50.0), X, X)
    for pair in (((0, 8, 2), (0, 1, 2)), ((0, 9, 1), (0, 1, 3)), ((0, 12, 0), (0, 1, 2))):
        versions.update(zip(("jax", "jax-tvm-ffi"), pair, strict=True))
        _registry._check_pair()
    versions["jax-tvm-ffi"] = None
    with pytest.raises(eqxcute.BackendError, match="pip install jax-tvm-ffi"):
        _registry._check_pair()
    versions["nvidia-cutlass-dsl"] = None
    with pytest.raises(eqxcute.BackendError, match="pip install nvidia-cutlass-dsl"):
        lowered(Saxpy(50.0), X, X)


# Other processes.

CHILD = """
import json, sys, time
sys.path[:0] = {paths!r}
import jax, jax.numpy as jnp
import eqxcute, tvm_ffi, jax_tvm_ffi, tvm_ffi_orcjit
from eqxcute import testing, _primitive, _registry
from bridge_kernels import Saxpy
x = jnp.arange(5.0)
operands, call = _primitive.flatten(Saxpy({alpha}, {beta}), (x, x))
with eqxcute.architecture("sm_90a"):
    start = time.perf_counter()
    found = _primitive.view_of(call, operands)
    target = _registry.target(found, _primitive.plan_of(found))
    seconds = time.perf_counter() - start
print(json.dumps([target, testing.compile_count(), seconds]))
"""


def child(alpha, beta=1.0, **env):
    code = CHILD.format(paths=[str(Path(__file__).parent.parent)], alpha=alpha, beta=beta)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
    )


def answer(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def test_a_second_process_takes_the_cached_kernel():
    """K01, K02: the same key in another process, another hash seed; no compile, no import of the compiler's passes."""
    name, count, _ = answer(child(60.0, PYTHONHASHSEED="1"))
    assert count == 1
    again, count, seconds = answer(child(60.0, beta=3.0, PYTHONHASHSEED="2"))
    assert (again, count) == (name, 0)
    assert seconds <= 0.1, f"a cached kernel took {seconds:.3f} s"
    assert name.split(".")[-1] in lowered(Saxpy(60.0), X, X)


@pytest.mark.slow
def test_processes_that_start_together_compile_once():
    answers = [answer(p) for p in [child(61.0) for _ in range(3)]]
    assert len({name for name, _, _ in answers}) == 1
    assert sum(count for _, count, _ in answers) == 1


@pytest.mark.slow
def test_without_a_cache_each_process_compiles():
    assert answer(child(62.0, EQXCUTE_CACHE="0"))[1] == 1
    assert answer(child(62.0, EQXCUTE_CACHE="0"))[1] == 1


def test_trees_reach_the_launcher_whole():
    tree = {"b": X, "a": (jnp.ones((2, 3)), None)}
    one, other = lowered(AnyTree(), X, tree), lowered(AnyTree(), X, (X, jnp.ones((2, 3))))
    assert one != other  # other structures are other kernels


def test_export_for_two_platforms():
    """J09, in part: the same export holds the custom call for CUDA and the reference for a CPU."""
    with eqxcute.architecture("sm_90a"):
        exported = jax.export.export(
            jax.jit(Saxpy(2.0)),
            platforms=("cpu", "cuda"),
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name(Saxpy(2.0)))],
        )(X, X)
    np.testing.assert_allclose(exported.call(X, X), 3 * X, rtol=1e-6)
    assert "eqxcute.saxpy" in exported.mlir_module()


def name(kernel) -> str:
    text = lowered(kernel, X, X)
    return text.split("@eqxcute.")[1].split("(")[0].join(["eqxcute.", ""])
