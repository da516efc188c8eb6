"""Sums in memory that do not depend on the order of their terms: float32 numbers added as whole numbers, by atomics.

A finite float32 is m 2^(e - 149) with |m| < 2^24 and 0 <= e <= 253. A sum is 12 words of 64 bits, word w in units of
2^(24 w - 149): a term adds the low 24 bits of m 2^(e mod 24), and those above, to the words e // 24 and e // 24 + 1.
Whole numbers add up to the same in any order (Demmel and Nguyen 2015; Kulisch's accumulator), and no bit is lost.

A word takes 2^39 terms of one sign before it could wrap around. Memory adds to one word once a clock at best: that many
take minutes in one launch.

Infinities and NaN are added to the result itself, whose order does not matter either: it is 0 before.

    words      (12, *shape, 2) int32, the pairs as int64: terms of neighbours are neighbours in memory
    clear      before the first term
    fold       after the last: carries move up, all digits get one sign, and are added from the lowest on in float64
"""

from typing import Final, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64, const_expr, range_constexpr

from .._config import WORDS

DIGIT: Final = 24  # bits of a word that one term fills
THREADS: Final = 256


class Target(NamedTuple):
    """The float32 gradient of an array, and its words where the order of terms must not matter."""

    gradient: cute.Tensor
    words: cute.Tensor | None = None


def place_of(target: Target, indices) -> Int64:
    """Where an entry stands, in elements."""
    place = Int64(0)
    for i, stride in zip(indices, target.gradient.stride, strict=True):
        place += Int64(i) * stride
    return place


@cute.jit
def add_term(target: Target, place, x):
    """Adds a number to an entry."""
    if const_expr(target.words is None):
        add_float(target, place, x)
    else:
        bits = x.bitcast(Int32)
        exponent = (bits >> 23) & 255
        if exponent == 255:
            add_float(target, place, x)
        else:
            m = bits & 0x7FFFFF
            if exponent > 0:
                m = m | 0x800000
            e = cutlass.max(exponent - 1, 0)
            word = e // DIGIT
            whole = Int64(m) << Int64(e - word * DIGIT)
            low, high = whole & ((1 << DIGIT) - 1), whole >> DIGIT
            if bits < 0:
                low, high = -low, -high
            size = size_of(target.gradient)
            to = words_of(target.words) + (word * size + place)
            if low != 0:
                cute.arch.red(to, low, op="add", dtype="u64", sem="relaxed", scope="gpu")
            if high != 0:
                cute.arch.red(to + size, high, op="add", dtype="u64", sem="relaxed", scope="gpu")


def add_float(target: Target, place, x) -> None:
    to = target.gradient.iterator + place
    cute.arch.red(to, x, op="add", dtype="f32", sem="relaxed", scope="gpu")


def words_of(words: cute.Tensor) -> cute.Pointer:
    return cute.recast_ptr(words.iterator, dtype=Int64)


def size_of(array: cute.Tensor) -> Int64:
    """Entries; they may pass 2**31."""
    size = Int64(1)
    for length in array.shape:
        size = size * length
    return size


@cute.jit
def clear(stream, target: Target):
    """Before the first term."""
    size = size_of(target.gradient)
    if size > 0:
        zero(stream, target.gradient.iterator, size)
        if const_expr(target.words is not None):
            zero(stream, words_of(target.words), size * WORDS)


@cute.jit
def zero(stream, array: cute.Pointer, size: Int64):
    zero_kernel(array, size).launch(grid=grid_of(size), block=[THREADS, 1, 1], stream=stream)


@cute.jit
def fold(stream, target: Target):
    """After the last term: the sums, into the gradient."""
    size = size_of(target.gradient)
    if size > 0:
        fold_kernel(target.gradient.iterator, words_of(target.words), size).launch(
            grid=grid_of(size), block=[THREADS, 1, 1], stream=stream
        )


def grid_of(size: Int64) -> list:
    return [Int32((size + THREADS - 1) // THREADS), 1, 1]


def thread() -> Int64:
    return Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]


def entry(array: cute.Pointer, at: Int64) -> cute.Tensor:
    return cute.make_tensor(array + at, cute.make_layout(1))


@cute.kernel
def zero_kernel(array: cute.Pointer, size: Int64):
    at = thread()
    if at < size:
        entry(array, at)[0] = array.dtype(0)


@cute.kernel
def fold_kernel(gradient: cute.Pointer, words: cute.Pointer, size: Int64):
    at = thread()
    if at < size:
        to = entry(gradient, at)
        digits = cute.make_rmem_tensor(WORDS, Int64)
        for w in range_constexpr(WORDS):
            digits[w] = entry(words, w * size + at)[0]
        carry(digits)
        negative = digits[WORDS - 1] < 0
        if negative:
            for w in range_constexpr(WORDS):
                digits[w] = -digits[w]
            carry(digits)
        total = Float64(0.0)
        for w in range_constexpr(WORDS):
            total += Float64(digits[w]) * Float64(2.0 ** (DIGIT * w - 149))
        total = -total if negative else total
        to[0] = to[0] + total.to(Float32)


@cute.jit
def carry(digits):
    """All but the last word into [0, 2^24)."""
    for w in range_constexpr(WORDS - 1):
        digits[w + 1] = digits[w + 1] + (digits[w] >> DIGIT)
        digits[w] = digits[w] & ((1 << DIGIT) - 1)
