"""The compile key's view of code: equal for what compiles to the same, other for what does not."""

import collections
import dataclasses
import enum
import functools
import importlib
import importlib.util
import operator
import subprocess
import sys
import textwrap
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcute import SpecError
from eqxcute._fingerprint import fingerprint, structure_fingerprint
from eqxcute._libraries import source_digest

OFFSET = 1


def helper(x):
    return x + OFFSET


def uses_helper(x):
    return helper(x)


def make(factor):
    return lambda x: x * factor


def test_a_remade_function_is_the_same_and_another_constant_is_not():
    assert fingerprint(make(2)) == fingerprint(make(2))
    assert fingerprint(make(2)) != fingerprint(make(3))
    assert fingerprint(make(2)) != fingerprint(make(2.0))
    assert fingerprint(make(np.arange(3))) != fingerprint(make(np.arange(3) + 1))
    assert fingerprint(make(jnp.arange(3))) == fingerprint(make(jnp.arange(3)))


def test_a_changed_global_and_a_changed_helper_are_seen(monkeypatch):
    """FlashAttention-4's source hash sees neither."""
    before = fingerprint(uses_helper)
    monkeypatch.setitem(globals(), "OFFSET", 2)
    changed_global = fingerprint(uses_helper)
    monkeypatch.setitem(globals(), "OFFSET", 1)
    assert fingerprint(uses_helper) == before
    monkeypatch.setitem(globals(), "helper", lambda x: x - OFFSET)
    assert len({before, changed_global, fingerprint(uses_helper)}) == 3


def test_classes_are_what_their_methods_do():
    def cls(body):
        space = {}
        exec(textwrap.dedent(body), space)
        return space["K"]

    one = cls("class K:\n    a = 1\n    def f(self): return self.a + 1")
    same = cls(
        "class K:\n    a = 1\n\n    def f(self):\n        # a comment\n        return self.a + 1"
    )
    body = cls("class K:\n    a = 1\n    def f(self): return self.a + 2")
    attribute = cls("class K:\n    a = 2\n    def f(self): return self.a + 1")
    base = cls(
        "class B:\n    def g(self): return 1\nclass K(B):\n    a = 1\n    def f(self): return self.a + 1"
    )
    assert fingerprint(one) == fingerprint(same)
    assert len({fingerprint(x) for x in (one, body, attribute, base)}) == 4


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int = 128
    colour: Colour = Colour.RED


class Mask(eqx.Module):
    width: int = eqx.field(static=True)
    values: object = None


def test_values():
    different = [
        1, 1.0, True, "1", b"1", None, (1,), (1, (2,)), ((1, 2),), {"a": 1}, {"a": 2}, frozenset({1, 2}), frozenset({1}),
        -0.0, 0.0, float("nan"), np.float32(1), np.int8(1), np.dtype("int8"), np.dtype("bool"), Colour.RED, Colour.BLUE,
        Config(), Config(64), Config(colour=Colour.BLUE), Mask(1), Mask(2), jnp.float32, jnp.bfloat16, jax.nn.relu, jax.nn.gelu,
        jnp.sin, functools.partial(make, 1), functools.partial(make, 2), make(1).__code__, types.SimpleNamespace,
    ]  # fmt: skip
    digests = [fingerprint(value) for value in different]
    assert len(set(digests)) == len(different)
    assert digests == [fingerprint(value) for value in different]
    assert fingerprint(Mask(1, jax.ShapeDtypeStruct((3,), jnp.float32))) == fingerprint(
        Mask(1, jax.ShapeDtypeStruct((4,), jnp.float32))
    )


def wrap(function, sign):
    @functools.wraps(function)
    def wrapped(x):
        return sign * function(x)

    return wrapped


def test_a_wrapper_is_not_what_it_wraps():
    """`functools.wraps` makes them look alike: name, module and `__wrapped__` are those of the wrapped function."""
    functions = [
        helper,
        wrap(helper, 1),
        wrap(helper, -1),
        jax.grad(helper),
        jax.vmap(helper),
        jax.jit(helper),
    ]
    assert len({fingerprint(f) for f in functions}) == len(functions)
    assert fingerprint(jax.grad(helper)) == fingerprint(jax.grad(helper))


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by


def test_objects_are_what_they_hold():
    for make_one in (
        Scale,
        Slotted,
        lambda by: make(Scale(by)),
        lambda by: types.SimpleNamespace(by=by),
        lambda by: np.vectorize(make(by)),
        lambda by: functools.partial(make, by),
        lambda by: operator.itemgetter(by),
        lambda by: slice(0, by),
        lambda by: range(by),
    ):
        assert fingerprint(make_one(2)) == fingerprint(make_one(2))
        assert fingerprint(make_one(2)) != fingerprint(make_one(3))


def test_descriptors_are_what_they_do():
    def cls(value):
        class K:
            @functools.cached_property
            def a(self):
                return value

            b = functools.partialmethod(make, value)

            @property
            def c(self):
                return value

            @classmethod
            def d(cls):
                return value

        return K

    assert fingerprint(cls(1)) == fingerprint(cls(1))
    assert fingerprint(cls(1)) != fingerprint(cls(2))


def test_fields_of_named_tuples_and_values_of_enums_count():
    one = collections.namedtuple("State", "a b")
    other = collections.namedtuple("State", "b a")
    assert fingerprint(one(1, 2)) != fingerprint(other(1, 2))
    assert structure_fingerprint(one(1, 2)) != structure_fingerprint(other(1, 2))
    first = enum.Enum("Mode", {"SCALE": 2.0}, module=__name__)
    second = enum.Enum("Mode", {"SCALE": 9.0}, module=__name__)
    assert fingerprint(first.SCALE) != fingerprint(second.SCALE)


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, child, kind):
        self.child, self.kind = child, kind

    def tree_flatten(self):
        return (self.child,), self.kind

    @classmethod
    def tree_unflatten(cls, kind, children):
        return cls(*children, kind)


def test_the_structure_of_arguments_counts():
    trees = [
        Node(1, "a"),
        Node(1, "b"),
        Node((1,), "a"),
        (1,),
        [1],
        {"a": 1},
        {"b": 1},
        (1, None),
        (None, 1),
        Mask(1, 2),
        Mask(2, 2),
    ]
    assert len({structure_fingerprint(tree) for tree in trees}) == len(trees)
    assert structure_fingerprint(Node(1, "a")) == structure_fingerprint(Node(2, "a"))


def test_every_use_of_a_module_counts(monkeypatch):
    """Two methods use two functions of one module; either may change."""
    module = types.ModuleType("mine")
    exec("def foo(x): return x\ndef bar(x): return x\ndef baz(x): return x", module.__dict__)

    class K:
        def a(self, x):
            return module.foo(x)

        def b(self, x):
            return module.bar(x)

    before = fingerprint(K)
    for name, seen in (("foo", True), ("bar", True), ("baz", False)):
        space = {}
        exec(f"def {name}(x): return x + 1", space)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, space[name])
            assert (fingerprint(K) != before) == seen, name


kernel = [0]  # a global that has the name of an attribute


def test_a_global_counts_only_if_it_is_looked_up(monkeypatch):
    def uses_attribute(self):
        return self.kernel

    before = fingerprint(uses_attribute)
    monkeypatch.setitem(globals(), "kernel", [1])
    assert fingerprint(uses_attribute) == before


def test_installed_packages_are_walked_if_the_kernel_is_theirs_and_versioned_if_not(
    tmp_path, monkeypatch
):
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def installed(factor):
        (site / "theirs.py").write_text(f"FACTOR = {factor}\n\ndef f(x):\n    return x * FACTOR\n")
        sys.modules.pop("theirs", None)
        importlib.invalidate_caches()
        return importlib.import_module("theirs").f

    one, other = (fingerprint(installed(factor), own=["theirs"]) for factor in (2.0, 5.25))
    assert one != other


def test_a_traced_value_is_refused():
    def trace(x):
        fingerprint(make(x))

    with pytest.raises(SpecError, match="holds a value that JAX is tracing"):
        jax.make_jaxpr(trace)(1.0)


def test_recursion_ends():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert fingerprint(even) != fingerprint(odd)


def test_what_cannot_be_told_is_refused():
    with pytest.raises(SpecError, match=r"holds a .*generator.*cannot tell"):
        fingerprint(x for x in (1, 2))


def test_modules_that_a_function_imports_are_known_by_source(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "deep.py").write_text("VALUE = 1\n")
    (tmp_path / "mine" / "code.py").write_text("from .deep import VALUE\n")
    (tmp_path / "mine" / "entry.py").write_text(
        "def launch():\n    from .code import VALUE\n    return VALUE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.find_spec("mine.entry")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def now():
        source_digest.cache_clear()
        return fingerprint(module.launch)

    before = now()
    assert now() == before
    (tmp_path / "mine" / "deep.py").write_text("VALUE = 2\n")  # two imports away
    after = now()
    assert after != before
    assert "mine.code" not in sys.modules  # known without being imported


def test_the_same_in_another_process_and_under_another_hash_seed():
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from bridge_kernels import LookUp, Saxpy, Table\n"
        "from eqxcute._fingerprint import fingerprint\n"
        "print(fingerprint((Saxpy(2.0), LookUp(Table(None, 3.0)), frozenset('abcdefgh'))))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
