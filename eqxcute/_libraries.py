"""Which code is a library, known by its version, and which is the user's own, known by what it does."""

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

# Roots that are libraries wherever they are installed, and their distributions. Walking them would take minutes.
_KNOWN = {
    "cutlass": "nvidia-cutlass-dsl",
    "equinox": "equinox",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "jaxtyping": "jaxtyping",
    "ml_dtypes": "ml-dtypes",
    "numpy": "numpy",
    "optax": "optax",
    "scipy": "scipy",
    "tvm_ffi": "apache-tvm-ffi",
}
_INSTALLED = ("site-packages", "dist-packages")


def is_library(module: str | None, own: frozenset[str] = frozenset()) -> bool:
    """True for a module that is known by its version.

    That is the standard library, the libraries above, eqxcute without its layers, and whatever is installed; but no module
    of the packages `own`, in which the kernel is written, installed or not.
    """
    if module is None or module == "__main__":
        return False
    root = module.split(".")[0]
    if root == "eqxcute":
        return not module.startswith("eqxcute.layers")
    if root in _KNOWN or root in sys.stdlib_module_names:
        return True
    if root in own:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or origin(module)
    return file is not None and any(part in _INSTALLED for part in Path(file).parts)


@functools.lru_cache(maxsize=1024)
def version(module: str) -> str:
    """Of the library that a module is in."""
    root = module.split(".")[0]
    if root == "eqxcute":
        return bridge_digest()
    if root in sys.stdlib_module_names:
        return f"python {sys.version_info.major}.{sys.version_info.minor}"
    try:
        return importlib.metadata.version(_KNOWN.get(root, root))
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(root), "__version__", None)) + source_digest(
            root, follow=False
        )


@functools.lru_cache(maxsize=1)
def bridge_digest() -> str:
    """Of eqxcute's own source: how it calls a kernel decides what is compiled."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(
        b"".join(hashlib.sha256(f.read_bytes()).digest() for f in files)
    ).hexdigest()


@functools.lru_cache(maxsize=4096)
def _spec(module: str):
    """How a module would be imported. Imports the packages that it is in, and nothing else."""
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None


def origin(module: str) -> str | None:
    """The file of a module, without importing it."""
    spec = _spec(module)
    return spec.origin if spec is not None and spec.has_location else None


def with_members(module: str, names: Iterable[str]) -> list[str]:
    """A module, and what of `names` may be modules in it."""
    spec = _spec(module)
    if spec is None or spec.submodule_search_locations is None:
        return [module]
    return [module, *(f"{module}.{name}" for name in names)]


@functools.lru_cache(maxsize=1024)
def source_digest(module: str, own: frozenset[str] = frozenset(), follow: bool = True) -> str:
    """Of a module's source and, to `follow`, of the own modules that it imports, in turn. Read once a process."""
    found = hashlib.sha256()
    waiting, seen = [module], set()
    while waiting:
        name = waiting.pop()
        file = origin(name)
        if name in seen or file is None:
            continue
        seen.add(name)
        source = Path(file).read_bytes()
        found.update(name.encode() + b"\0" + hashlib.sha256(source).digest())
        if follow and file.endswith(".py"):
            package = name if Path(file).name == "__init__.py" else name.rpartition(".")[0]
            for imported in _imports(source, package):
                if is_library(imported, own):
                    found.update(f"{imported} {version(imported)}".encode())
                else:
                    waiting.append(imported)
    return found.hexdigest()


def _imports(source: bytes, package: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(name, package) if node.level else name
            found += with_members(base, [alias.name for alias in node.names])
    return sorted(set(found))
