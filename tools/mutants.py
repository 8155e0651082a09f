"""Measure what the tests protect: change one thing in the source, run the tests that reach it, count what they notice.

    python -m tools.mutants map --tree . --out reached.jsonl
    python -m tools.mutants run --tree . --reached reached.jsonl --out mutants.jsonl

`map` runs the tests once and writes which blocks of statements each of them reaches, in processes it starts too. `run`
makes seeded mutants in equal numbers per room (comparisons, boundaries, branches, dropped statements) and runs, for
each, tests that reach its block: the quickest of each file, those of its room first. A mutant is killed if a test fails
or hangs. The choice of a mutant depends on its own text alone, so an edit elsewhere leaves it. `--tree` may be the
checkout of another commit, to compare its share killed per room: by chance, shares of 72 mutants differ by 5 points.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue

ROOMS = ("core", "render", "label", "pack", "load", "compiler", "store")
CONTROLS = 16
MARKS = "not slow and not gpu and not trainers"
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
FOLDER = Path(__file__).parent / "reached"


@dataclass(frozen=True, order=True)
class Mutant:
    """One change: the bytes from `start` to `stop` of a file become `text`."""

    room: str
    path: str
    block: int  # the line of the first statement of its block
    line: int
    kind: str
    start: int
    stop: int
    text: str

    def applied(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.start] + self.text.encode() + source[self.stop :]


def mutants_of(source: bytes, path: str, room: str) -> Iterator[Mutant]:
    """Yield every change that can be made inside the functions of a source file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def changed(block: int, node: ast.expr | ast.stmt, kind: str, text: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(room, path, block, node.lineno, kind, start, stop, text)

    def walk(node: ast.AST, block: int) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.arguments):
            return
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if block and not is_function:
            if isinstance(node, ast.expr | ast.stmt):
                for kind, text in changes_of(node):
                    yield changed(block, node, kind, text)
            if isinstance(node, ast.Raise):
                return  # the words of an error
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            children = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]
            is_block = children and isinstance(children[0], ast.stmt) and not isinstance(node, ast.ClassDef)
            for child in children:
                yield from walk(child, children[0].lineno if is_block and (block or is_function) else block)

    yield from walk(ast.parse(source), 0)


def changes_of(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the kinds of change that a node allows, each with its new text."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in SWAPPED:
            yield "comparison", f"({ast.unparse(ast.Compare(left, [SWAPPED[type(op)]()], right))})"
        case ast.BoolOp(op, values):
            yield "and/or", f"({ast.unparse(ast.BoolOp(SWAPPED[type(op)](), values))})"
        case ast.BinOp(left, op, right) if type(op) in SWAPPED and not (is_text(left) or is_text(right)):
            yield "plus/minus", f"({ast.unparse(ast.BinOp(left, SWAPPED[type(op)](), right))})"
        case ast.Constant(value) if type(value) is int:
            yield "off by one", f"({value + 1})"
        case ast.IfExp(test, body, orelse):
            yield "swapped branches", f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield "dropped statement", "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()], _):
            yield "dropped statement", "pass"
        case _:
            pass


def is_text(node: ast.expr) -> bool:
    """Say if an expression is a literal text."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def chosen(tree: Path, count: int, seed: int) -> list[Mutant]:
    """Choose mutants by a seed, as many from each room: those with the smallest hashes."""
    rooms = []
    for number, room in enumerate(ROOMS):
        found: list[tuple[bytes, Mutant]] = []
        for path in sorted((tree / "src/chatmill" / room).rglob("*.py")):
            source, texts = path.read_bytes(), Counter[str]()
            for one in mutants_of(source, str(path.relative_to(tree)), room):
                text = f"{seed} {one.path} {source[one.start : one.stop].decode()} {one.text}"
                texts[text] += 1
                found.append((sha256(f"{text} {texts[text]}".encode()).digest(), one))
        rooms.append([one for _, one in sorted(found)[: count // len(ROOMS) + (number < count % len(ROOMS))]])
    # One of each room in turn: a run that is cut short has seen all rooms.
    return [one for round_ in zip_longest(*rooms) for one in round_ if one is not None]


def controls(tree: Path, mutants: list[Mutant]) -> list[Mutant]:
    """Return mutants that change nothing: tests that fail with them fail for another reason."""
    texts = [(tree / one.path).read_bytes()[one.start : one.stop].decode() for one in mutants]
    return [replace(one, room="control", text=text) for one, text in zip(mutants, texts, strict=True)]


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Return the environment in which Python imports Chatmill from a tree."""
    return os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}:{os.environ.get('PYTHONPATH', '')}", **more}


def make_map(tree: Path, out: Path, jobs: int) -> None:
    """Run the tests once and write what each reaches: one line for each test that passes."""
    with tempfile.TemporaryDirectory() as folder:
        plain = environment(tree, CHATMILL_REACHED=folder)
        plain["PYTHONPATH"] = f"{FOLDER}:{plain['PYTHONPATH']}"
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "-m", MARKS, "-p", "reached_plugin"]
        subprocess.run([*command, "-p", "no:cacheprovider", "--tb=no"], cwd=tree, env=plain, check=False)
        with out.open("w") as file:
            for part in sorted(Path(folder).glob("*.jsonl")):
                file.write(part.read_text())


class Run:
    """Runs of mutants, several at a time, each in a copy of the tree."""

    def __init__(self, tree: Path, reached: Path, seconds: float) -> None:
        self.tree = tree
        self.seconds = seconds
        self.tests: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for line in reached.open():
            test = json.loads(line)
            for block in test["blocks"]:
                self.tests[block].append((test["seconds"], test["name"]))
        self.copies: SimpleQueue[Path] = SimpleQueue()

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return tests that reach a mutant: of each file the quickest, then the next, as many as fit into the seconds.

        Tests of one file look at the same things. In each round those of the mutant's room come first.
        """
        files: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for seconds, name in sorted(self.tests[f"{mutant.path}:{mutant.block}"]):
            files[name.partition("::")[0]].append((seconds, name))
        ranked = [
            (number, not file.startswith(f"tests/{mutant.room}/"), seconds, name)
            for file, tests in files.items()
            for number, (seconds, name) in enumerate(tests)
        ]
        names = []
        spent = 0.0
        for _, _, seconds, name in sorted(ranked):
            if spent + seconds <= self.seconds:
                spent += seconds
                names.append(name)
        return names

    def is_killed(self, mutant: Mutant) -> bool | None:
        """Say if a test notices the mutant; None if no test reaches it."""
        names = self.tests_of(mutant)
        if not names:
            return None
        copy = self.copies.get()
        path = copy / mutant.path
        source = path.read_bytes()
        try:
            path.write_bytes(mutant.applied(source))
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                "--hypothesis-seed=0",
                "--tb=no",
            ]
            limit = 60 + 5 * self.seconds
            done = subprocess.run(
                [*command, *names], cwd=copy, env=environment(copy), capture_output=True, check=False, timeout=limit
            )
            return done.returncode != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            path.write_bytes(source)
            self.copies.put(copy)

    def all(self, mutants: list[Mutant], jobs: int, limit: float, out: Path) -> list[dict[str, object]]:
        """Run mutants until the time limit; write and return those that were run, with what became of each."""
        began = time.monotonic()

        def result(mutant: Mutant) -> dict[str, object] | None:
            if time.monotonic() - began > limit:
                return None
            return asdict(mutant) | {"killed": self.is_killed(mutant)}

        ignored = shutil.ignore_patterns(
            ".git", ".venv*", ".hypothesis", "__pycache__", ".mypy_cache", ".ruff_cache", ".trainers"
        )
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool, out.open("w") as file:
            for number in range(jobs):
                copy = Path(folder) / str(number)
                shutil.copytree(self.tree, copy, ignore=ignored, symlinks=True)
                self.copies.put(copy)
            results = []
            for number, one in enumerate(pool.map(result, mutants), 1):
                if one is not None:
                    results.append(one)
                    print(json.dumps(one), file=file, flush=True)
                print(f"\r{number} of {len(mutants)} mutants", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            return results


def table(results: list[dict[str, object]]) -> str:
    """Return the share killed per room, and the survivors."""
    lines = ["| room | mutants | killed | not reached | share |", "|---|---|---|---|---|"]
    for room in (*ROOMS, "control"):
        these = [one for one in results if one["room"] == room]
        killed = sum(one["killed"] is True for one in these)
        missed = sum(one["killed"] is None for one in these)
        lines.append(f"| {room} | {len(these)} | {killed} | {missed} | {killed / max(len(these), 1):.0%} |")
    lines.append("")
    for one in sorted(results, key=lambda one: (str(one["path"]), str(one["line"]))):
        if not one["killed"] and one["room"] != "control":
            state = "not reached" if one["killed"] is None else "survived"
            lines.append(f"{state}: {one['path']}:{one['line']} {one['kind']}: {one['text']}")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("map", "run"))
    parser.add_argument("--tree", type=Path, default=Path())
    parser.add_argument("--reached", type=Path, help="what `map` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mutants", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="most seconds of tests for a mutant")
    parser.add_argument("--limit", type=float, default=1e9, help="begin no mutant after so many seconds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    tree = options.tree.resolve()
    if options.action == "map":
        make_map(tree, options.out, options.jobs)
        return
    if options.reached is None:
        parser.error("`run` needs --reached")
    mutants = chosen(tree, options.mutants, options.seed)
    mutants = controls(tree, mutants[:CONTROLS]) + mutants
    print(table(Run(tree, options.reached, options.seconds).all(mutants, options.jobs, options.limit, options.out)))


if __name__ == "__main__":
    main()
