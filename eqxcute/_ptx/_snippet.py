"""A few instructions in a kernel of their own: one thread an element. For tests."""

import numpy as np

from ._run import run_ptx

_WORD = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def per_thread(code: str, result, *inputs: np.ndarray, **options) -> np.ndarray:
    """Runs `code` in one thread for each element of the inputs.

    **Arguments:**

    - `code`: PTX statements. Input i is the register `%a<i>`, a predicate if it is bool. The
        result is `%d`, a predicate if `result` is bool. `%i` is the thread's number, and the
        registers `%p<8>`, `%h<8>`, `%r<16>`, `%q<8>` (pred, b16, b32, b64) are free.
    - `result`: Its dtype.
    - `inputs`: 1-D, of one length, at most 1024.
    - `options`: For `run_ptx`.

    **Returns:** the results, one an element.
    """
    result = np.dtype(result)
    count = len(inputs[0])
    out = np.zeros(count, result)
    arrays = [*inputs, out]
    lines = [
        ".version 8.8",
        ".target sm_90a",
        ".address_size 64",
        ".visible .entry snippet(",
        ",\n".join(f".param .u64 p{i}" for i in range(len(arrays))),
        ")\n{",
        ".reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b64 %q<8>;",
        ".reg .b32 %i; .reg .b64 %at<99>; .reg .b16 %flag;",
        "mov.u32 %i, %tid.x;",
    ]
    for i, array in enumerate(arrays):
        name = "%d" if array is out else f"%a{i}"
        size = array.dtype.itemsize
        kind = "pred" if array.dtype.kind == "b" else _REGISTER[size]
        lines += [
            f".reg .{kind} {name};",
            f"ld.param.u64 %at{i}, [p{i}];",
            f"mad.wide.u32 %at{i}, %i, {size}, %at{i};",
        ]
        if array is out:
            continue
        if array.dtype.kind == "b":
            lines += [f"ld.global.u8 %flag, [%at{i}];", f"setp.ne.b16 {name}, %flag, 0;"]
        else:
            lines.append(f"ld.global.{_WORD[size]} {name}, [%at{i}];")
    lines.append(code)
    last = f"[%at{len(inputs)}]"
    if result.kind == "b":
        lines += ["selp.b16 %flag, 1, 0, %d;", f"st.global.b8 {last}, %flag;"]
    else:
        lines.append(f"st.global.{_WORD[result.itemsize]} {last}, %d;")
    lines.append("ret;\n}")
    run_ptx(
        "\n".join(lines),
        arrays,
        block=(count, 1, 1),
        written=[len(inputs)],
        **options,
    )
    return out
