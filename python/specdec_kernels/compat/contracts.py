"""What a plugin relies on in an engine's source: read without importing the engine, and compared with what is expected.

A plugin consists of parts, which can be taken over one by one. Each part lists its contracts. The same code reads an
installed engine when it starts, an unpacked wheel, and a wheel of a package index.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = [
    "Contract",
    "Exactly",
    "Found",
    "Lines",
    "Names",
    "Parameters",
    "Part",
    "Same",
    "Sources",
    "broken_parts",
    "recorded",
]

Found = list[str] | int | None
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Contract:
    """An expectation of one place of an engine's source.

    Attributes:
        place: a dotted module, and after a colon a function, a class, or a method as `Class.method`.
    """

    place: str

    @property
    def key(self) -> str:
        """Return a name for records of what was read."""
        return f"{type(self).__name__} {self.place}"

    def read(self, sources: Sources) -> Found:
        """Return what the source has there, as JSON can hold it; None if the place does not exist."""
        node = sources.node(self.place)
        return None if node is None else self._read(node)

    def broken(self, found: Found) -> str | None:
        """Return how what was read differs from what is expected; None if it does not."""
        return f"{self.place} does not exist" if found is None else self._broken(found)

    def _read(self, node: ast.AST) -> Found:
        raise NotImplementedError

    def _broken(self, found: Found) -> str | None:
        raise NotImplementedError


@dataclass(frozen=True)
class Parameters(Contract):
    """A function has these parameters, in this order.

    Attributes:
        names: the parameters, `self` included.
        more: whether others may follow.
    """

    names: tuple[str, ...]
    more: bool = False

    def _read(self, node: ast.AST) -> Found:
        if not isinstance(node, Function):
            return None
        given = node.args
        return [argument.arg for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]]

    def _broken(self, found: Found) -> str | None:
        assert isinstance(found, list)
        if is_expected(found, self.names, self.more):
            return None
        wanted = ", ".join([*self.names, *(["..."] if self.more else [])])
        return f"{self.place} has the parameters ({', '.join(found)}), expected ({wanted})"


@dataclass(frozen=True)
class Names(Contract):
    """A module or a class has these members.

    A module's are all names that it binds, also in conditions. A class's are its methods, its fields, and the
    attributes of `self` that its methods assign.
    """

    names: tuple[str, ...]

    def _read(self, node: ast.AST) -> Found:
        known = members(node)
        return [name for name in self.names if name in known]

    def _broken(self, found: Found) -> str | None:
        assert isinstance(found, list)
        missing = [name for name in self.names if name not in found]
        return f"{self.place} lacks {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Lines(Contract):
    """The source of a place contains a text, in the spelling of `ast.unparse`.

    Attributes:
        text: what it contains.
        count: how often; None: at least once.
    """

    text: str
    count: int | None = None

    @property
    def key(self) -> str:
        return f"{super().key} `{self.text}`"

    def _read(self, node: ast.AST) -> Found:
        return ast.unparse(node).count(self.text)

    def _broken(self, found: Found) -> str | None:
        if found == self.count or (self.count is None and found):
            return None
        wanted = "" if self.count is None else f", expected {self.count}"
        return f"{self.place} has {found} times `{self.text}`{wanted}" if found else f"{self.place} lacks `{self.text}`"


@dataclass(frozen=True)
class Exactly(Contract):
    """A class has these members of a kind, in this order.

    Attributes:
        kind: `fields` (names that its body assigns), `methods` (without an underscore in front), or `abstract` (methods
            whose body raises).
        names: the members.
        more: whether others may follow.
    """

    kind: str
    names: tuple[str, ...]
    more: bool = False

    @property
    def key(self) -> str:
        return f"{super().key} {self.kind}"

    def _read(self, node: ast.AST) -> Found:
        return MEMBERS_OF_KIND[self.kind](node) if isinstance(node, ast.ClassDef) else None

    def _broken(self, found: Found) -> str | None:
        assert isinstance(found, list)
        if is_expected(found, self.names, self.more):
            return None
        differing = sorted({*found} ^ {*self.names}) or ["another order"]
        return f"{self.place} has other {self.kind} ({', '.join(differing)})"


@dataclass(frozen=True)
class Same(Contract):
    """A place has the tested source, apart from comments and docstrings.

    Attributes:
        digest: of the source.
    """

    digest: int

    def _read(self, node: ast.AST) -> Found:
        return zlib.crc32(ast.unparse(without_docstrings(node)).encode())

    def _broken(self, found: Found) -> str | None:
        return None if found == self.digest else f"{self.place} is not the tested one"


@dataclass(frozen=True)
class Part:
    """A part of a plugin.

    Attributes:
        name: as log lines name it.
        contracts: what it relies on.
        needs: names of parts without which it changes nothing.
    """

    name: str
    contracts: tuple[Contract, ...]
    needs: tuple[str, ...] = ()


@dataclass
class Sources:
    """The source of an engine's modules.

    Attributes:
        text_of: returns the text of a dotted module; None if there is none.
    """

    text_of: Callable[[str], str | None]
    _modules: dict[str, ast.Module | None] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of_folder(cls, folder: Path) -> Sources:
        """Read packages below a folder."""

        def text_of(module: str) -> str | None:
            path = folder.joinpath(*module.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            return path.read_text() if path.is_file() else None

        return cls(text_of)

    @classmethod
    def of_installed(cls, package: str) -> Sources | None:
        """Read an installed package, which is not imported; None if it has no source files."""
        spec = PathFinder.find_spec(package) or importlib.util.find_spec(package)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            return None
        return cls.of_folder(Path(spec.origin).parent.parent)

    @classmethod
    def of_texts(cls, texts: Mapping[str, str]) -> Sources:
        """Read texts by dotted module."""
        return cls(texts.get)

    def node(self, place: str) -> ast.AST | None:
        """Return the syntax tree of a module, function, class or method; None if it does not exist or parse."""
        module, _, path = place.partition(":")
        if module not in self._modules:
            self._modules[module] = parsed(self.text_of(module))
        node: ast.AST | None = self._modules[module]
        for name in filter(None, path.split(".")):
            node = next((one for one in definitions(node) if one.name == name), None) if node else None
        return node


def is_expected(found: Sequence[str], names: tuple[str, ...], more: bool) -> bool:
    """Return whether names are the expected ones, after which others may follow if `more`."""
    return tuple(found[: len(names)] if more else found) == names


def parsed(text: str | None) -> ast.Module | None:
    try:
        return None if text is None else ast.parse(text)
    except SyntaxError:
        return None


def definitions(node: ast.AST) -> list[Function | ast.ClassDef]:
    """Return the functions and classes of a module or class, also in conditions, not those of inner functions."""
    found: list[Function | ast.ClassDef] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            found.append(child)
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            found += definitions(child)
    return found


def members(node: ast.AST) -> set[str]:
    """Return the names that a module or class binds, and attributes of `self` that are assigned in it."""
    names: set[str] = set()
    for child in ast.walk(node):
        if child is node:
            continue
        if isinstance(child, Function | ast.ClassDef):
            names.add(child.name)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in child.names}
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
            names |= {one.id for one in flat if isinstance(one, ast.Name)}
            names |= {
                one.attr
                for one in flat
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self"
            }
    return names


def recorded(parts: Sequence[Part], sources: Sources) -> dict[str, Found]:
    """Return what the contracts of all parts read, by their keys. `broken_parts` also reads such a record."""
    found: dict[str, Found] = {}
    for contract in (contract for part in parts for contract in part.contracts):
        read, before = contract.read(sources), found.get(contract.key)
        if isinstance(contract, Names) and isinstance(read, list) and isinstance(before, list):
            read = sorted({*before, *read})  # other names of the same place
        found[contract.key] = read
    return found


def fields_of(node: ast.ClassDef) -> list[str]:
    names: list[str] = []
    for child in node.body:
        targets = (
            child.targets
            if isinstance(child, ast.Assign)
            else [child.target]
            if isinstance(child, ast.AnnAssign)
            else []
        )
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def methods_of(node: ast.ClassDef) -> list[str]:
    return [child.name for child in node.body if isinstance(child, Function) and not child.name.startswith("_")]


def abstract_of(node: ast.ClassDef) -> list[str]:
    methods = [child for child in node.body if isinstance(child, Function)]
    return [method.name for method in methods if any(isinstance(line, ast.Raise) for line in method.body)]


MEMBERS_OF_KIND = {"fields": fields_of, "methods": methods_of, "abstract": abstract_of}


def without_docstrings(node: ast.AST) -> ast.AST:
    """Return a copy of a syntax tree without the docstrings of its functions and classes."""
    node = copy.deepcopy(node)
    for child in ast.walk(node):
        if (
            isinstance(child, Function | ast.ClassDef | ast.Module)
            and ast.get_docstring(child, clean=False) is not None
        ):
            child.body = child.body[1:] or [ast.Pass()]
    return node


def broken_parts(parts: Sequence[Part], sources: Sources | Mapping[str, Found]) -> dict[str, str]:
    """Return the parts that cannot be taken over, each with its first broken contract."""
    broken: dict[str, str] = {}
    for part in parts:
        lacking = next((name for name in part.needs if name in broken), None)
        if lacking is not None:
            broken[part.name] = f"it needs {lacking}"
            continue
        for contract in part.contracts:
            found = contract.read(sources) if isinstance(sources, Sources) else sources.get(contract.key)
            reason = contract.broken(found)
            if reason is not None:
                broken[part.name] = reason
                break
    return broken
