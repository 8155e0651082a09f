"""The recipe that `chatmill init` writes: YAML, with what the sample showed in its comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import numpy as np
from msgspec import structs

from chatmill.compiler.first_recipe import FileLook, Look, counts_text
from chatmill.compiler.recipe import Source, recipe_of
from chatmill.core.conversations import unused_sentence
from chatmill.core.publish import storing
from chatmill.errors import ConfigError
from chatmill.read.field_maps import map_of
from chatmill.render.registry import bundled_names, find_template

TEMPLATE = Path(__file__).with_name("recipe.yaml.jinja")
WIDTH = 110
"""Columns of the written recipe."""
PLAIN = re.compile(r"[\w./-]+")
OFF = "; the build stops here: null accepts all, a limit so much"


def write_recipe(look: Look, path: Path) -> None:
    """Write the recipe with its comments to a new file; one that is there is never overwritten."""
    text = recipe_text(look)
    with storing(path):
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            refuse_to_overwrite(path)
        with file:
            file.write(text)


def refuse_to_overwrite(path: Path) -> NoReturn:
    """The error about a recipe that is there."""
    raise ConfigError(f"{path} is there already and is not overwritten: remove it, or choose another --out") from None


def gate_choices(look: Look) -> list[str]:
    """What the sample has that a gate of the recipe will stop, in words, with the choice."""
    total = sum(file.records for file in look.files)
    return [
        f"In the sample of {total:,} records {gate.sentence}: the build will stop at the gate {gate.name}. Change the "
        f"data, the policy or the row length; or accept it with {gate.name}: null (or a limit) in the recipe's gates."
        for gate in look.gates
        if not gate.passed
    ]


def recipe_text(look: Look) -> str:
    """The recipe as YAML with comments, from `recipe.yaml.jinja`; reading it gives `look.recipe`."""
    import yaml

    text = (
        _environment()
        .from_string(TEMPLATE.read_text("utf-8"))
        .render(
            look=look,
            recipe=look.recipe,
            template=find_template(look.recipe.template),
            sources=[_source(source, look) for source in look.recipe.sources],
            lengths=_lengths(look),
            limits=structs.asdict(look.recipe.gates),
            found=_found(look),
        )
    )
    assert recipe_of(yaml.safe_load(text)) == look.recipe, "the written recipe is another one"
    return text


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"comment": _comment, "scalar": _scalar, "number": "{:,}".format}
    environment.globals |= {
        "seen": _seen,
        "counts": counts_text,
        "unused_sentence": unused_sentence,
        "template_names": bundled_names,
    }
    return environment


def _comment(text: str, indent: str = "") -> str:
    mark = f"{indent}# "
    lines = textwrap.wrap(text, WIDTH, initial_indent=mark, subsequent_indent=mark, break_on_hyphens=False)
    return "\n".join(lines)


def _seen(files: Sequence[FileLook]) -> str:
    first = "all" if all(file.whole for file in files) else "the first"
    return f"{first} {sum(file.records for file in files):,} records"


def _source(source: Source, look: Look) -> dict[str, Any]:
    files = [file for file in look.files if file.path in source.patterns]
    bad = sum((file.bad for file in files), Counter[str]())
    cannot = f"; {bad.total():,} cannot be read: {counts_text(bad)}" if bad else ""
    return {
        "paths": source.patterns,
        "shape": source.shape,
        "map": map_of(source.shape) if source.shape and source.shape.startswith("{") else None,
        "looked_at": f"Looked at: {_seen(files)}{cannot}.",
    }


def _lengths(look: Look) -> str:
    over = int((look.lengths > (look.recipe.packing.max_length or 0)).sum())
    longer = f"; {over:,} are longer than the row" if over else ""
    shares = ", ".join(f"{share}% have {int(np.percentile(look.lengths, share)):,} or fewer" for share in (50, 90, 99))
    return f"{shares}; the longest has {int(look.lengths[-1]):,}{longer}"


def _found(look: Look) -> dict[str, str]:
    """What the sample has of each gate."""
    return {gate.name: gate.sentence + ("" if gate.passed else OFF) for gate in look.gates}


def _scalar(value: Any) -> str:
    """A value as YAML: JSON is YAML, and plain words need no quotes."""
    import yaml

    if isinstance(value, str) and PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
