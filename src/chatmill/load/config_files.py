"""Reading config files into named entries that know their line: XML without entities, YAML, and close names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError, MissingExtraError
from chatmill.load.yaml_files import yaml_node

SECTION = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEntry:
    """One option as it was written."""

    name: str
    value: Any
    where: str
    """`file:line`, or another place to look at."""
    is_text: bool = False
    """The value is the text of an XML element, not yet of its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSection:
    """The training section of a file, in its order."""

    entries: list[ConfigEntry]
    where: str


def read_section(path: Path) -> ConfigSection:
    """The training section of an XML or YAML file; known by its suffix, else by its first character."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    suffix = path.suffix.lower()
    if suffix == ".xml" or (suffix not in {".yaml", ".yml"} and data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<"):
        return _xml_section(path, data)
    return _yaml_section(path, data)


OTHER_NAMES = frozenset({"batch_sizes", "pad_token", "patch_size", "patch_sizes"})
"""What training sections of real projects hold that is near an option of the loaders, and no misspelling of it."""


def close_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a misspelling of: at most one sign in five differs, case and `_` aside."""
    best: tuple[int, str] | None = None
    for candidate in known:
        plain = _plain(candidate)
        distance = _edits(_plain(name), plain)
        if distance <= max(1, round(len(plain) / 5)) and (best is None or distance < best[0]):
            best = (distance, candidate)
    return best[1] if best else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _edits(a: str, b: str) -> int:
    """Insertions, deletions and replacements that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (x != y))
    return row[-1]


@dataclass(slots=True)
class _Element:
    name: str
    line: int
    children: list[_Element]
    text: str = ""

    def value(self) -> Any:
        """Text, or a mapping for an element with children (only kept, never interpreted)."""
        if not self.children:
            return self.text.strip()
        return {child.name: child.value() for child in self.children}


def _xml_section(path: Path, data: bytes) -> ConfigSection:
    root = _parse_xml(path, data)
    sections = [root] if root.name == SECTION else [child for child in root.children if child.name == SECTION]
    if len(sections) > 1:
        raise ConfigError(
            f"{path}:{sections[1].line}: a second <{SECTION}> (the first is in line {sections[0].line}); keep one"
        )
    if not sections:
        raise ConfigError(
            f"{path}:{root.line}: <{root.name}> has no <{SECTION}> element; it is the root or a child of it"
        )
    seen: dict[str, int] = {}
    entries = []
    for element in sections[0].children:
        if element.name in seen:
            raise ConfigError(
                f"{path}:{element.line}: <{element.name}> a second time (the first is in line {seen[element.name]})"
            )
        seen[element.name] = element.line
        where = f"{path}:{element.line}"
        entries.append(ConfigEntry(name=element.name, value=element.value(), where=where, is_text=not element.children))
    return ConfigSection(entries=entries, where=f"{path}:{sections[0].line}")


def read_elements(path: Path) -> dict[str, Any]:
    """The elements beside `<training>`, by name: text, or a mapping; empty where `<training>` is the root."""
    root = _parse_xml(path, path.read_bytes())
    if root.name == SECTION:
        return {}
    return {child.name: child.value() for child in root.children if child.name != SECTION}


def _parse_xml(path: Path, data: bytes) -> _Element:
    """The tree of a file; entity declarations, outside references and broken XML are errors with their line."""
    try:
        import defusedxml
        import defusedxml.sax
    except ImportError as error:
        raise MissingExtraError(
            "defusedxml", "torch", "reading an XML config (YAML or keyword arguments do not)"
        ) from error
    import xml.sax
    from xml.sax.handler import ContentHandler

    class Tree(ContentHandler):
        def __init__(self) -> None:
            super().__init__()
            self.top = _Element("", 0, [])
            self.open = [self.top]
            self.locator: Any = None

        def setDocumentLocator(self, locator: Any) -> None:  # noqa: N802 - the name is SAX's
            self.locator = locator

        def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802 - the name is SAX's
            element = _Element(name, self.locator.getLineNumber(), [])
            self.open[-1].children.append(element)
            self.open.append(element)

        def endElement(self, name: str) -> None:  # noqa: N802 - the name is SAX's
            self.open.pop()

        def characters(self, content: str) -> None:
            self.open[-1].text += content

    tree = Tree()
    try:
        defusedxml.sax.parseString(data, tree)
    except defusedxml.DefusedXmlException as error:
        line = tree.locator.getLineNumber() if tree.locator else 1
        raise ConfigError(
            f"{path}:{line}: declares an entity or refers to another file ({type(error).__name__}); "
            "a config holds plain elements only"
        ) from None
    except xml.sax.SAXParseException as error:
        raise ConfigError(f"{path}:{error.getLineNumber()}: not well-formed XML: {error.getMessage()}") from None
    return tree.top.children[0]


def _yaml_section(path: Path, data: bytes) -> ConfigSection:
    """`training:` at the top or under `config:`, or the options themselves at the top."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("PyYAML", "torch", "reading a YAML config (keyword arguments do not)") from error
    try:
        loader = yaml.SafeLoader(data)
        try:
            node = yaml_node(loader, path)
            for name in ("config", SECTION):
                inner = _yaml_child(node, name)
                node = node if inner is None else inner
            return _yaml_mapping(path, node, loader)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not well-formed YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a config; take out levels") from None


def _yaml_child(node: Any, name: str) -> Any:
    pairs = node.value if getattr(node, "id", "") == "mapping" else []
    return next((value for key, value in pairs if key.value == name), None)


def _yaml_mapping(path: Path, node: Any, loader: Any) -> ConfigSection:
    if getattr(node, "id", "") != "mapping":
        line = node.start_mark.line + 1 if node is not None else 1
        raise ConfigError(f"{path}:{line}: the training section must be a mapping of options")
    seen: dict[str, int] = {}
    entries = []
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"{path}:{line}: {name} a second time (the first is in line {seen[name]})")
        seen[name] = line
        entries.append(ConfigEntry(name=name, value=loader.construct_object(value, deep=True), where=f"{path}:{line}"))
    return ConfigSection(entries=entries, where=f"{path}:{node.start_mark.line + 1}")
