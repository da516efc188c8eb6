"""What a kernel is, as bytes: the same in every process, another for any other kernel.

A value is its type and contents. A function is its bytecode, its defaults and closure, and the globals that it looks up,
walked in turn, so that a changed helper or global is another kernel and a renamed or re-made function is not. An object is
its class and its attributes. Library code is its name and the library's version (`_libraries.py`); a module that a function
imports when it runs is known by its source.
"""

import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.util
import io
import logging
import sys
import threading
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np

from . import _libraries
from ._errors import SpecError


def fingerprint(value: Any, own: Iterable[str] = ()) -> str:
    """A hexadecimal digest.

    **Arguments:**

    - `value`: A kernel, or anything that may stand in one.
    - `own`: Root packages whose code is walked although they are installed.

    **Raises:**

    `SpecError` for a value of which it cannot tell what it is.
    """
    walk = _Walk(frozenset(own))
    walk.visit(value)
    return walk.hash.hexdigest()


def structure_fingerprint(tree: Any, own: Iterable[str] = ()) -> str:
    """Of a pytree's structure: the types of its nodes and what they hold besides children."""
    walk = _Walk(frozenset(own))
    walk.structure(jax.tree.structure(tree))
    return walk.hash.hexdigest()


def own_roots(kernel: Any) -> set[str]:
    """The packages in which a kernel's class and its bases are written."""
    return {cls.__module__.split(".")[0] for cls in type(kernel).__mro__}


# Of a class: made by Python or a decorator from what is walked anyway, or of no effect on a trace.
_SKIPPED = frozenset(
    "__module__ __dict__ __weakref__ __doc__ __annotations__ __annotate_func__ __annotations_cache__ __repr__ __eq__"
    " __hash__ __match_args__ __dataclass_fields__ __dataclass_params__ __abstractmethods__ __abstractvars__"
    " __abstractclassvars__ __parameters__ __orig_bases__ __qualname__ __firstlineno__ __static_attributes__"
    " __replace__ __check_init__ _abc_impl".split()
)

# Of these the state does not matter to a kernel.
_STATELESS = (
    logging.Logger,
    io.IOBase,
    type(threading.Lock()),
    type(threading.RLock()),
    jax.Device,
)


def _state(value: Any, of_library: bool) -> Any:
    """What an object holds, or None if that cannot be seen."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if not of_library:
        slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
        if not slots and not hasattr(value, "__dict__"):
            return None
        state = {
            name: getattr(value, name)
            for name in slots
            if hasattr(value, name) and not name.startswith("__")
        }
        return state | dict(sorted(getattr(value, "__dict__", {}).items()))
    if isinstance(getattr(value, "__wrapped__", None), types.FunctionType):  # jax.jit, custom_jvp
        return value.__wrapped__
    try:
        return value.__reduce_ex__(2)  # as pickle sees it: some are written in C
    except Exception:  # noqa: BLE001  whatever a type that cannot be pickled raises
        return getattr(value, "__dict__", None)


class _References(NamedTuple):
    """What code looks up: globals, attributes of anything, and modules that it imports when it runs."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]  # level, name, members


@functools.lru_cache(maxsize=4096)
def _references(code: types.CodeType) -> _References:
    found, attributes, imports, constants = [], [], [], []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.append(step.argval)
        elif step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(step.argval)
        elif step.opname == "IMPORT_NAME":
            level, members = constants[-2:]
            imports.append((level, step.argval, tuple(members or ())))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _references(constant)
            found += inner.globals
            attributes += inner.attributes
            imports += inner.imports
    return _References(*(tuple(dict.fromkeys(names)) for names in (found, attributes, imports)))


def original_code(function: types.FunctionType) -> types.CodeType:
    """The code as written: CuTe puts its own version in place of a decorated function's when it first traces it."""
    return getattr(function, "_original_code", function.__code__)


class _Walk:
    def __init__(self, own: frozenset[str]):
        self.own = own
        self.hash = hashlib.sha256()
        self.seen: dict[Any, int] = {}  # what may refer to itself, by identity
        self.kept: list[Any] = []  # so that no identity is used twice
        self.strict = True  # inside the kernel; what code merely names may be opaque

    def put(self, *words: str) -> None:
        for word in words:
            data = word.encode("utf-8", "surrogatepass")
            self.hash.update(len(data).to_bytes(8, "little") + data)

    def once(self, value: Any, *more: str) -> bool:
        """False, and a reference written, if the walk has been here."""
        key = (id(value), *more)
        if key in self.seen:
            self.put("seen", str(self.seen[key]))
            return False
        self.seen[key] = len(self.seen)
        self.kept.append(value)
        return True

    def is_library(self, module: str | None) -> bool:
        return _libraries.is_library(module, self.own)

    def library(self, module: str, name: str) -> None:
        self.put("library", module, name, _libraries.version(module))

    def visit(self, value: Any) -> None:
        if isinstance(value, jax.core.Tracer):
            raise SpecError(
                f"A kernel's code holds a value that JAX is tracing ({value}). Pass it to the kernel as an argument, or make "
                "it a field of a module that is one."
            )
        if self.data(value) or self.code(value) or self.instance(value):
            return
        if self.strict:
            raise SpecError(
                f"A kernel holds a {type(value).__module__}.{type(value).__qualname__}, of which eqxcute cannot tell what it "
                "compiles to. Static fields are numbers, strings, dtypes, enums, tuples, frozen dataclasses, Equinox modules "
                "and functions."
            )
        self.put("opaque", type(value).__module__, type(value).__qualname__)

    def data(self, value: Any) -> bool:
        """Values. False if it is none."""
        kind = type(value)
        if value is None or value is Ellipsis or kind in (bool, int, str, bytes, complex):
            self.put(kind.__name__, repr(value))
        elif kind is float:
            self.put("float", value.hex())
        elif isinstance(value, enum.Enum):
            self.put("enum", str(value.name))
            self.visit(kind)
            self.visit(value.value)
        elif isinstance(value, np.dtype):
            self.put("dtype", value.str, value.name)
        elif isinstance(value, (np.ndarray, np.generic, jax.Array)) and not isinstance(
            value, jax.core.Tracer
        ):
            array = np.asarray(value)
            self.put(
                "array",
                array.dtype.name,
                repr(array.shape),
                hashlib.sha256(array.tobytes()).hexdigest(),
            )
        elif isinstance(value, jax.ShapeDtypeStruct):
            self.put("struct")  # an operand: its dtype and dims are in the key on their own
        elif isinstance(value, (tuple, list)):
            self.put(
                kind.__module__, kind.__qualname__, *getattr(kind, "_fields", ()), str(len(value))
            )
            if self.once(value):
                for item in value:
                    self.visit(item)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self.put("dict", str(len(value)))
            if self.once(value):
                for key, item in list(value.items()):
                    self.visit(key)
                    self.visit(item)
        elif isinstance(value, (set, frozenset)):
            self.put("set", *sorted(fingerprint(item, self.own) for item in value))
        else:
            return False
        return True

    def code(self, value: Any) -> bool:
        """Functions, classes and modules. False if it is none."""
        if isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, types.MethodType):
            self.put("method")
            self.visit((value.__func__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod)):
            self.put(type(value).__name__)
            self.visit(value.__func__)
        elif isinstance(value, property):
            self.put("property")
            self.visit((value.fget, value.fset))
        elif isinstance(value, type):
            self.type(value)
        elif isinstance(value, types.ModuleType):
            self.put("module", value.__name__)
        elif isinstance(value, types.CodeType):
            self.bytecode(value)
        elif isinstance(
            value,
            (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
        ):
            self.put("builtin", value.__qualname__)
        elif isinstance(value, types.MemberDescriptorType):
            self.put("slot", value.__name__)
        else:
            return False
        return True

    def instance(self, value: Any) -> bool:
        """An object: its class and its state. False if it keeps that out of sight."""
        if isinstance(value, _STATELESS):
            self.put("stateless", type(value).__qualname__)
            return True
        state = _state(value, self.is_library(type(value).__module__))
        if state is None:
            return False
        self.put("instance")
        self.type(type(value))
        if self.once(value):
            self.visit(state) if self.strict else self.lenient(state)
        return True

    def lenient(self, value: Any) -> None:
        """Of what code merely names: an object that keeps its state out of sight need not stop a compile."""
        strict, self.strict = self.strict, False
        try:
            self.visit(value)
        finally:
            self.strict = strict

    def function(self, function: types.FunctionType) -> None:
        if not self.once(function):
            return
        # `functools.wraps` copies `__module__` and `__qualname__`: where code stands is told by its globals.
        module, code = function.__globals__.get("__name__"), original_code(function)
        if module is not None and self.is_library(module):
            self.library(module, code.co_qualname)
            self.closure(function, ())
            return
        self.put("function")
        self.bytecode(code)
        self.lenient((function.__defaults__, function.__kwdefaults__))
        references = _references(code)
        self.closure(function, references.attributes)
        for name in references.globals:
            if name in function.__globals__:
                self.put("global", name)
                self.reference(function.__globals__[name], references.attributes)
        package = function.__globals__.get("__package__") or ""
        for level, name, members in references.imports:
            base = importlib.util.resolve_name("." * level + name, package) if level else name
            for imported in _libraries.with_members(base, members):
                if self.is_library(imported):
                    self.put("imports", imported, _libraries.version(imported))
                elif _libraries.origin(imported) is not None:
                    self.put("imports", imported, _libraries.source_digest(imported, self.own))

    def closure(self, function: types.FunctionType, attributes: tuple[str, ...]) -> None:
        for cell in function.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # not yet filled: a recursive definition
                contents = None
            self.reference(contents, attributes)

    def reference(self, value: Any, attributes: tuple[str, ...]) -> None:
        """What a function names. Of an own module: what the function may take from it."""
        if not isinstance(value, types.ModuleType):
            self.lenient(value)
            return
        self.put("module", value.__name__)
        if self.is_library(value.__name__):
            self.put(_libraries.version(value.__name__))
            return
        for name in attributes:
            if hasattr(value, name) and self.once(value, name):
                self.put("attribute", name)
                self.reference(getattr(value, name), attributes)

    def bytecode(self, code: types.CodeType) -> None:
        self.put(
            "code",
            code.co_code.hex(),
            *code.co_names,
            "|",
            *code.co_varnames,
            "|",
            *code.co_freevars,
        )
        self.put(str((code.co_argcount, code.co_kwonlyargcount, code.co_flags)))
        for constant in code.co_consts:
            self.visit(constant)

    def type(self, cls: type) -> None:
        self.put("type", cls.__module__, cls.__qualname__)
        # A class made at run time may call itself of a library: then its name is not there.
        known = hasattr(sys.modules.get(cls.__module__), cls.__qualname__.split(".")[0])
        if self.is_library(cls.__module__) and known:
            self.put(_libraries.version(cls.__module__))
            return
        if not self.once(cls):
            return
        for base in cls.__bases__:
            self.visit(base)
        for name in sorted(vars(cls)):
            if name not in _SKIPPED:
                self.put(name)
                self.lenient(vars(cls)[name])

    def structure(self, tree) -> None:
        node = tree.node_data()
        if node is None:
            self.put("leaf")
            return
        kind, rest = node
        self.visit(kind)
        self.lenient(rest)
        self.put(str(tree.num_nodes))
        for child in tree.children():
            self.structure(child)
