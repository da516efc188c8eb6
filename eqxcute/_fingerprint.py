"""What a kernel is, as bytes: the same in every process, another for any other kernel.

A value is its type and contents. A function is its bytecode, its defaults and closure, and the globals that it names, walked
in turn, so that a changed helper or global is another kernel and a renamed or re-made function is not. Libraries (the
standard library, installed packages, eqxcute itself) are known by name: their versions are in the key elsewhere. A module
that a function imports when it runs is known by its source, and by that of the modules it imports.
"""

import ast
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ._errors import SpecError


def fingerprint(value: Any) -> str:
    """A hexadecimal digest. Raises `SpecError` for a value of which it cannot tell what it is."""
    walk = _Walk()
    walk.visit(value)
    return walk.hash.hexdigest()


_LIBRARIES = tuple(
    sorted(
        {
            str(Path(sysconfig.get_path(name)).resolve())
            for name in ("stdlib", "platstdlib", "purelib", "platlib")
        }
    )
)


def _is_library(module: str | None) -> bool:
    """True for code that the compile key knows by its version, or not at all."""
    if module is None:
        return False
    root = module.split(".")[0]
    if root == "eqxcute":
        return not module.startswith("eqxcute.layers")
    if module == "__main__":
        return False
    if root in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or _origin(module)
    return file is None or str(Path(file).resolve()).startswith(_LIBRARIES)


def _is_library_object(value: Any) -> bool:
    """True for a function or class that its module, a library, knows by name: not for one that was made at run time."""
    root = value.__qualname__.split(".")[0]
    return _is_library(value.__module__) and hasattr(sys.modules.get(value.__module__), root)


@functools.lru_cache(maxsize=4096)
def _spec(module: str):
    """How a module would be imported. Imports the packages that it is in, and nothing else."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None


def _origin(module: str) -> str | None:
    spec = _spec(module)
    return spec.origin if spec is not None and spec.has_location else None


def _with_members(module: str, names) -> list[str]:
    """A module, and what of `names` may be modules in it."""
    spec = _spec(module)
    if spec is None or spec.submodule_search_locations is None:
        return [module]
    return [module, *(f"{module}.{name}" for name in names)]


_SKIPPED = frozenset(
    "__module__ __dict__ __weakref__ __doc__ __annotations__ __annotate_func__ __annotations_cache__ __init__ __repr__ __eq__"
    " __hash__ __match_args__ __dataclass_fields__ __dataclass_params__ __abstractmethods__ __abstractvars__"
    " __abstractclassvars__ __parameters__ __orig_bases__ __qualname__ __firstlineno__ __static_attributes__ __slots__"
    " __replace__ __check_init__ _abc_impl".split()
)


class _Walk:
    def __init__(self):
        self.hash = hashlib.sha256()
        self.seen: dict[
            int, int
        ] = {}  # functions, classes and modules, by identity: they may refer to each other
        self.kept: list[Any] = []  # so that no identity is used twice

    def put(self, *words: str) -> None:
        for word in words:
            data = word.encode("utf-8", "surrogatepass")
            self.hash.update(len(data).to_bytes(8, "little") + data)

    def once(self, value: Any) -> bool:
        """False, and a reference written, if the walk has been here."""
        if id(value) in self.seen:
            self.put("seen", str(self.seen[id(value)]))
            return False
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        return True

    def visit(self, value: Any) -> None:
        if not self.data(value) and not self.code(value):
            raise SpecError(
                f"A kernel holds a {type(value).__module__}.{type(value).__qualname__}, of which eqxcute cannot tell what it "
                "compiles to. Static fields are numbers, strings, dtypes, enums, tuples, frozen dataclasses, Equinox modules "
                "and functions."
            )

    def data(self, value: Any) -> bool:
        """Values. False if it is none."""
        kind = type(value)
        if value is None or value is Ellipsis or kind in (bool, int, str, bytes, complex):
            self.put(kind.__name__, repr(value))
        elif kind is float:
            self.put("float", value.hex())
        elif isinstance(value, enum.Enum):
            self.put("enum", kind.__module__, kind.__qualname__, value.name)
        elif isinstance(value, np.dtype):
            self.put("dtype", value.str, value.name)
        elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
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
            self.put(kind.__qualname__, str(len(value)))
            for item in value:
                self.visit(item)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self.put("dict", str(len(value)))
            for key, item in value.items():
                self.visit(key)
                self.visit(item)
        elif isinstance(value, (set, frozenset)):
            self.put("set", *sorted(fingerprint(item) for item in value))
        else:
            return False
        return True

    def code(self, value: Any) -> bool:
        """Functions, classes, modules and instances. False if it is none."""
        if isinstance(value, functools.partial):
            self.put("partial")
            self.visit((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self.put("method")
            self.visit((value.__func__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod, types.FunctionType)):
            self.function(inspect.unwrap(value))
        elif isinstance(value, property):
            self.put("property")
            self.visit((value.fget, value.fset))
        elif isinstance(value, type):
            self.type(value)
        elif isinstance(value, types.ModuleType):
            self.module(value, ())
        elif isinstance(value, types.CodeType):
            self.bytecode(value)
        elif dataclasses.is_dataclass(value):
            self.put("instance")
            self.visit(type(value))
            for field in dataclasses.fields(value):
                self.put(field.name)
                self.visit(getattr(value, field.name, None))
        elif isinstance(
            getattr(value, "__wrapped__", None), types.FunctionType
        ):  # jit, custom_jvp, functools.cache
            self.put("wrapped", type(value).__qualname__)
            self.function(inspect.unwrap(value))
        elif isinstance(value, (types.BuiltinFunctionType, np.ufunc)):
            self.put("builtin", value.__name__)
        elif _is_library(type(value).__module__) and _is_library(
            getattr(value, "__module__", None)
        ):
            name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
            if not isinstance(name, str):
                return False
            self.put("library", value.__module__, name)
        else:
            return False
        return True

    def function(self, function: Callable) -> None:
        if not isinstance(function, types.FunctionType):
            self.visit(function)
            return
        if _is_library_object(function):
            self.put("library", function.__module__, function.__qualname__)
            self.closure(function)
            return
        if not self.once(function):
            return
        self.put("function")
        code = original_code(function)
        self.bytecode(code)
        self.visit((function.__defaults__, function.__kwdefaults__))
        self.closure(function)
        names = tuple(dict.fromkeys(_names(code)))
        for name in names:
            if name in function.__globals__:
                self.put(name)
                found = function.__globals__[name]
                self.module(found, names) if isinstance(found, types.ModuleType) else self.lenient(
                    found
                )
        for module in _imports(code, function.__globals__.get("__package__") or ""):
            self.put("imports", module, source_digest(module))

    def closure(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # not yet filled: a recursive definition
                contents = None
            self.lenient(contents)

    def lenient(self, value: Any) -> None:
        """Of what a function merely names: a logger or a lock need not stop a compile."""
        if not self.data(value) and not self.code(value):
            self.put("opaque", type(value).__module__, type(value).__qualname__)

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
        if _is_library_object(cls) or not self.once(cls):
            return
        for base in cls.__bases__:
            self.visit(base)
        for name in sorted(vars(cls)):
            if name not in _SKIPPED:
                self.put(name)
                self.lenient(vars(cls)[name])

    def module(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """An own module is those of its attributes that the function names."""
        self.put("module", module.__name__)
        if _is_library(module.__name__) or not self.once(module):
            return
        for name in names:
            if hasattr(module, name):
                self.put(name)
                found = getattr(module, name)
                self.module(found, names) if isinstance(found, types.ModuleType) else self.lenient(
                    found
                )


def original_code(function: types.FunctionType) -> types.CodeType:
    """The code as written: CuTe puts its own version in place of a decorated function's when it first traces it."""
    return getattr(function, "_original_code", function.__code__)


def _names(code: types.CodeType) -> Iterator[str]:
    """Globals and attributes that the code, and the code inside it, may look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _imports(code: types.CodeType, package: str) -> Iterator[str]:
    """Own modules that the code imports when it runs."""
    constants: list[Any] = []
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            level, names = constants[-2:]
            module = (
                importlib.util.resolve_name("." * level + step.argval, package)
                if level
                else step.argval
            )
            for name in _with_members(module, names or ()):
                if not _is_library(name) and _origin(name) is not None:
                    yield name
        elif step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")):
            constants.append(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports(constant, package)


@functools.lru_cache(maxsize=1024)
def source_digest(module: str) -> str:
    """Of a module's source, and of the own modules that it imports, in turn. Read once a process."""
    found = hashlib.sha256()
    waiting, seen = [module], set()
    while waiting:
        name = waiting.pop()
        origin = _origin(name)
        if name in seen or origin is None:
            continue
        seen.add(name)
        source = Path(origin).read_bytes()
        found.update(name.encode() + b"\0" + hashlib.sha256(source).digest())
        if origin.endswith(".py"):
            is_package = Path(origin).name == "__init__.py"
            package = name if is_package else name.rpartition(".")[0]
            waiting += [
                m for m in _source_imports(source, package) if m not in seen and not _is_library(m)
            ]
    return found.hexdigest()


def _source_imports(source: bytes, package: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(name, package) if node.level else name
            found += _with_members(base, [alias.name for alias in node.names])
    return sorted(set(found))
