"""Reads the training section of a config file: XML without entities, with the line of each element, or YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

from chatmill.errors import ConfigError
from chatmill.yaml_files import read_mapping

SECTION = "training"


class Entry(NamedTuple):
    """One option as it was written."""

    name: str
    value: Any
    where: str
    """The file, for XML with the line."""
    is_text: bool = False
    """The value is the text of an XML element, which is not yet of its type."""


def read_section(path: Path) -> tuple[str, list[Entry]]:
    """Read the place and entries of the training section; XML is told by its suffix, else by its first character."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    suffix = path.suffix.lower()
    if suffix == ".xml" or (suffix not in {".yaml", ".yml"} and data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"<"):
        return _xml_section(path, data)
    section: Any = read_mapping(path, "config file", "the options of training")
    for name in ("config", SECTION):
        section = section[name] if isinstance(section, dict) and name in section else section
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: the training section must be a mapping of options")
    return str(path), [Entry(str(name), value, str(path)) for name, value in section.items()]


class _Element:
    """An element of XML, or the document around the first one."""

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where, self.text = name, where, ""
        self.children: list[_Element] = []

    @property
    def value(self) -> Any:
        """Its text; a mapping where it has other elements inside."""
        return {child.name: child.value for child in self.children} if self.children else self.text.strip()


def _xml_section(path: Path, data: bytes) -> tuple[str, list[Entry]]:
    root = _parse(path, data)
    sections = [root] if root.name == SECTION else [child for child in root.children if child.name == SECTION]
    if not sections:
        raise ConfigError(f"{root.where}: <{root.name}> has no <{SECTION}> element; it is the root or a child of it")
    seen: dict[str, str] = {}
    for element in [*sections, *sections[0].children]:
        if element.name in seen:
            raise ConfigError(f"{element.where}: a second <{element.name}> (the first is at {seen[element.name]})")
        seen[element.name] = element.where
    entries = [Entry(child.name, child.value, child.where, True) for child in sections[0].children]
    return sections[0].where, entries


def _parse(path: Path, data: bytes) -> _Element:
    """The root of a file; a document type, which could declare entities, and broken XML are errors with their line."""
    parser = expat.ParserCreate()
    opened = [_Element("", str(path))]

    def start(name: str, attributes: dict[str, str]) -> None:
        element = _Element(name, f"{path}:{parser.CurrentLineNumber}")
        opened[-1].children.append(element)
        opened.append(element)

    def text(content: str) -> None:
        opened[-1].text += content

    def refuse(*declared: object) -> None:
        raise ConfigError(
            f"{path}:{parser.CurrentLineNumber}: has a document type, which declares an entity or refers to another "
            "file; a config holds plain elements only"
        )

    parser.StartElementHandler, parser.CharacterDataHandler = start, text
    parser.EndElementHandler = lambda name: opened.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise ConfigError(f"{path}:{error.lineno}: not well-formed XML: {expat.ErrorString(error.code)}") from None
    return opened[0].children[0]
