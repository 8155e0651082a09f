"""Reading config files into named entries that know their line: XML without entities, YAML, and close names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatmill.errors import ConfigError, need

SECTION = "training"


@dataclass(slots=True, kw_only=True)
class ConfigEntry:
    """One option as it was written, or a section with its entries in their order."""

    name: str
    where: str
    """`file:line`, or another place to look at."""
    value: Any = None
    """The text of an XML element, or a value that has its type already."""
    children: list[ConfigEntry] = field(default_factory=list)
    """Elements of an XML element, or the keys of a section in YAML."""
    is_text: bool = False
    """The value is text that is not yet of its type."""

    def plain(self) -> Any:
        """The value; of an XML element that has others inside, a mapping."""
        if not self.children:
            return self.value.strip() if self.is_text else self.value
        return {child.name: child.plain() for child in self.children}


def read_section(path: Path) -> ConfigEntry:
    """The training section of an XML or YAML file; known by its suffix, else by its first character."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    suffix = path.suffix.lower()
    is_xml = suffix == ".xml" or (suffix not in {".yaml", ".yml"} and data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<")
    root = _parse_xml(path, data) if is_xml else _yaml_section(path, data)
    sections = [root] if root.name == SECTION else [child for child in root.children if child.name == SECTION]
    if len(sections) > 1:
        raise ConfigError(f"{sections[1].where}: a second <{SECTION}> (the first is at {sections[0].where}); keep one")
    if not sections:
        raise ConfigError(f"{root.where}: <{root.name}> has no <{SECTION}> element; it is the root or a child of it")
    seen: dict[str, str] = {}
    for entry in sections[0].children:
        if entry.name in seen:
            raise ConfigError(f"{entry.where}: <{entry.name}> a second time (the first is at {seen[entry.name]})")
        seen[entry.name] = entry.where
    return sections[0]


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


def read_elements(path: Path) -> dict[str, Any]:
    """The elements beside `<training>`, by name: text, or a mapping; empty where `<training>` is the root."""
    root = _parse_xml(path, path.read_bytes())
    if root.name == SECTION:
        return {}
    return {child.name: child.plain() for child in root.children if child.name != SECTION}


def _parse_xml(path: Path, data: bytes) -> ConfigEntry:
    """The root of a file; entity declarations, outside references and broken XML are errors with their line."""
    need("defusedxml", "reading an XML config (YAML or keyword arguments do not)", "torch")
    import xml.sax
    from xml.sax.handler import ContentHandler

    import defusedxml.sax

    class Tree(ContentHandler):
        def __init__(self) -> None:
            super().__init__()
            self.top = ConfigEntry(name="", where=str(path))
            self.open = [self.top]
            self.locator: Any = None

        def setDocumentLocator(self, locator: Any) -> None:  # noqa: N802 - the name is SAX's
            self.locator = locator

        def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802 - the name is SAX's
            where = f"{path}:{self.locator.getLineNumber()}"
            element = ConfigEntry(name=name, where=where, value="", is_text=True)
            self.open[-1].children.append(element)
            self.open[-1].is_text = False
            self.open.append(element)

        def endElement(self, name: str) -> None:  # noqa: N802 - the name is SAX's
            self.open.pop()

        def characters(self, content: str) -> None:
            self.open[-1].value += content

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


def _yaml_section(path: Path, data: bytes) -> ConfigEntry:
    """`training:` at the top or under `config:`, or the options themselves at the top."""
    need("yaml", "reading a YAML config (keyword arguments do not)", "torch")
    import yaml

    try:
        loader = yaml.SafeLoader(data)
        try:
            node = loader.get_single_node()
            for name in ("config", SECTION):
                inside = node.value if getattr(node, "id", "") == "mapping" else []
                node = next((value for key, value in inside if key.value == name), node)
            where = f"{path}:{1 if node is None else node.start_mark.line + 1}"
            if getattr(node, "id", "") != "mapping":
                raise ConfigError(f"{where}: the training section must be a mapping of options")
            entries = [
                ConfigEntry(
                    name=str(key.value),
                    where=f"{path}:{key.start_mark.line + 1}",
                    value=loader.construct_object(value, deep=True),
                )
                for key, value in node.value
            ]
            return ConfigEntry(name=SECTION, where=where, children=entries)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not well-formed YAML: {getattr(error, 'problem', error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a config; take out levels") from None
