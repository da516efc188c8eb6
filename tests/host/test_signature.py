"""The signature string: what it means, and what it says when something does not fit."""

import jax
import jax.numpy as jnp
import pytest

from eqxcute import SpecError
from eqxcute._signature import bind, folded, parse


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def met(text, *arguments, **fields):
    names = ["x", "y", "z"][: len(arguments)]
    return bind("K", parse(text), names, arguments, fields)


@pytest.mark.parametrize(
    ("text", "shapes", "output"),
    [
        ("n, n -> n", [(3,), (3,)], (3,)),
        ("m k, k n -> n m", [(2, 5), (5, 7)], (7, 2)),
        ("... n!, n! -> ... n!", [(2, 3, 8), (8,)], (2, 3, 8)),
        ("... n!, n! -> ... n!", [(8,), (8,)], (8,)),
        ("..., ... -> ...", [(), ()], ()),
        ("..., () -> ... 2", [(4, 3), ()], (4, 3, 2)),
        ("n%4 -> n%4", [(0,)], (0,)),
        ("n 3 -> n", [(5, 3)], (5,)),
    ],
)
def test_output_shape(text, shapes, output):
    binding = met(text, *(shaped(*shape) for shape in shapes))
    assert binding.output_shape(parse(text).outputs[0]) == output


def test_a_static_integer_field_is_a_size():
    binding = met("n -> bins", shaped(3), bins=7)
    assert binding.output_shape(parse("n -> bins").outputs[0]) == (7,)
    with pytest.raises(SpecError, match=r"`self.n` has `n=4` and `x` has `n=3`"):
        met("n -> n", shaped(3), n=4)


def test_trees_and_none():
    tree = {"b": shaped(3), "a": (None, shaped(3, 2))}
    binding = met("[n, n d, n], {} -> n", tree, [shaped(9), shaped(1, 1)])
    assert [leaf.name for leaf in binding.leaves] == ["x['a'][1]", "x['b']", "y[0]", "y[1]"]
    assert met("n, n? -> n", shaped(3), None).sizes == {"n": 3}


@pytest.mark.parametrize(
    ("text", "shape", "want"),
    [
        ("... n", (2, 3, 4), (6, 4)),
        ("... n", (4,), (1, 4)),
        ("...", (2, 3), (6,)),
        ("...", (), (1,)),
    ],
)
def test_folded(text, shape, want):
    assert folded(parse(f"{text} -> {text}").outputs[0], shape) == want


@pytest.mark.parametrize(
    ("text", "shapes", "parts"),
    [
        ("n, n -> n", [(3,), (4,)], ["`K`", "`x` has `n=3`", "`y` has `n=4`", "jax.vmap"]),
        ("n, n -> n", [(3,)], ["takes 2 arguments", "got 1"]),
        ("n -> n", [(3, 4)], ["`x` has shape (3, 4), of rank 2", "`n`: rank 1", "jax.vmap"]),
        ("... m n -> ...", [(3,)], ["of rank 1", "at least rank 2", "Reshape"]),
        ("n%8 -> n", [(12,)], ["`n=12`", "multiple of 8", "Pad it to 16"]),
        ("n 3 -> n", [(5, 4)], ["`x` has shape (5, 4)", "3 where it has 4"]),
        ("... n, ... n -> n", [(2, 3), (4, 3)], ["same leading dims", "(2,)", "(4,)", "Broadcast"]),
        ("n -> m", [(3,)], ["`m`", "no argument and no static integer field"]),
        ("n -> ...", [(3,)], ["has `...`, but no argument has"]),
    ],
)
def test_what_does_not_fit_is_named(text, shapes, parts):
    with pytest.raises(SpecError) as caught:
        met(text, *(shaped(*shape) for shape in shapes))
    for part in parts:
        assert part in str(caught.value)


def test_misplaced_trees_are_named():
    with pytest.raises(SpecError, match=r"`x` must be one array.*got dict"):
        met("n -> n", {"a": shaped(3)})
    with pytest.raises(SpecError, match=r"`x` has 1 leaves .*has 2"):
        met("[n, n] -> n", (shaped(3),))
    with pytest.raises(SpecError, match=r"`y` is None.*`n\?`"):
        met("n, n -> n", shaped(3), None)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("n, n", "one `->`"),
        ("n -> n -> n", "one `->`"),
        ("n ->", "no output"),
        ("n, -> n", "empty term"),
        ("n*2 -> n", "'n*2'"),
        ("n ... -> n", "start of a term"),
        ("n%0 -> n", "'n%0'"),
        ("[n -> n", "not closed"),
        ("[[n]] -> n", "nested"),
        ("n -> [n]", "an output is one array"),
        ("n -> n?", "an output is one array"),
    ],
)
def test_a_signature_that_means_nothing_is_refused(text, part):
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert part in str(caught.value)
    assert repr(text) in str(caught.value)
