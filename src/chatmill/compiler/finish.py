"""The end of a build: ledger, gates, the manifests of the splits, and that of the dataset last."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from chatmill import __version__
from chatmill.compiler.batch_documents import NAMED
from chatmill.compiler.chunk_job import ChunkJob, recipe_json
from chatmill.compiler.chunk_output import REJECTED
from chatmill.compiler.chunk_shards import CHUNKS, ChunkPlace, Receipt
from chatmill.compiler.gates import check_gates, reason_lines
from chatmill.compiler.manifest import chunk_fingerprints, git_sha, split_files
from chatmill.compiler.pipeline import Pipeline
from chatmill.compiler.recipe import Recipe
from chatmill.compiler.sources import SourcePlan
from chatmill.compiler.work import clean_up
from chatmill.core.canonical import canonical_json
from chatmill.core.checksums import FileRecord
from chatmill.core.ledger import Ledger
from chatmill.core.publish import join_files, remove_path, storing, sync_folder, write_whole
from chatmill.errors import DataError, FormatError
from chatmill.files.builds import RemoteBuild
from chatmill.pack.plan import plan
from chatmill.store.episode_layout import INDEX, MANIFEST, SPLIT_MANIFEST, shard_name
from chatmill.store.episode_manifest import (
    BRANCHES,
    COLUMNS,
    EpisodeManifest,
    PackedRows,
    manifest_of_shards,
    shard_from_json,
)
from chatmill.store.receipts import FORMAT, FORMAT_VERSION, receipt_bytes, sealed


@dataclass(frozen=True, slots=True)
class PlannedBuild:
    """A build whose input is read: the jobs of its chunks, and how their shards become the dataset."""

    directory: Path
    recipe: Recipe
    pipeline: Pipeline
    planned: SourcePlan
    fingerprint: str
    store: RemoteBuild | None = None
    """Where the dataset goes, if not into `directory`."""

    def jobs(self) -> list[ChunkJob]:
        """Return one for each chunk."""
        names = chunk_fingerprints(self.recipe, self.planned.chunks, self.pipeline.fingerprints)
        home, is_only, recipe = self.directory.absolute(), len(names) == 1, recipe_json(self.recipe)
        return [
            ChunkJob(
                number=number,
                pieces=pieces,
                recipe=recipe,
                place=ChunkPlace(directory=home, number=number, is_only=is_only, store=self.store),
                fingerprint=name,
                build=self.fingerprint,
                files=self.pipeline.files,
                answers=self.pipeline.answers,
            )
            for number, (pieces, name) in enumerate(zip(self.planned.chunks, names, strict=True))
        ]

    def publish(self, jobs: Sequence[ChunkJob], receipts: Mapping[int, Receipt]) -> dict[str, Any]:
        """Publish the dataset from the shards of all chunks, which are on disk."""
        directory = self.directory
        ledger = self._ledger(receipts)
        with storing(directory, "write the dataset in"):
            manifests, splits = self._with_rows(self._splits([receipts[job.number] for job in jobs], ledger))
            problems = ledger.imbalance(sum(split.tokens for split in manifests.values()))
            if problems:
                raise FormatError("the ledger does not balance: " + "; ".join(problems))
            files: dict[str, FileRecord] = {}
            for split in manifests.values():
                write_whole(directory / split.split / SPLIT_MANIFEST, split.to_bytes())
                files |= split_files(directory, split)
            ledger.padding += sum(summary.get("padding", 0) for summary in splits.values())
            rejected = [job.place.rejected for job in jobs if receipts[job.number]["rejected"] is not None]
            for name, parts in ((REJECTED, rejected), (CHUNKS, [job.place.receipt for job in jobs])):
                if (joined := join_files(parts, directory / name)) is not None:
                    files[name] = joined
            manifest = self._manifest(splits, ledger, files)
            sync_folder(directory)
            write_whole(directory / MANIFEST, receipt_bytes(manifest))
            clean_up(directory)
        return manifest

    def _manifest(
        self, splits: Mapping[str, Mapping[str, Any]], ledger: Ledger, files: Mapping[str, FileRecord]
    ) -> dict[str, Any]:
        """Return the manifest of the dataset with these splits and files; `from` leads to the folder of its inputs."""
        recipe, pipeline = self.recipe, self.pipeline
        tokenizer, expander = pipeline.template.tokenizer, pipeline.template.expander
        pad_id = next(i for i in (tokenizer.pad_id, tokenizer.eos_id, 0) if i is not None)
        home = "" if self.store is not None else os.path.relpath(self.planned.base or ".", self.directory)
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            "git_sha": git_sha(),
            "created_unix_s": int(time.time()),
            "fingerprint": self.fingerprint,
            "recipe": recipe.as_json(),
            "recipe_sha256": hashlib.sha256(canonical_json(recipe.as_json())).hexdigest(),
            "inputs": [file.as_json() for file in self.planned.files],
            "scanned": [
                {"mtime_ns": file.mtime_ns, "chunk_bytes": size, "from": home}
                for file, size in zip(self.planned.files, self.planned.chunk_bytes, strict=True)
            ],
            "tokenizer": {
                "name": tokenizer.name,
                "given_as": recipe.tokenizer,
                "fingerprint": pipeline.fingerprints["tokenizer"],
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
                "pad_id": pad_id,
                "control_tokens": list(pipeline.template.control_tokens) if recipe.add_control_tokens else [],
            },
            "template": {"name": pipeline.template.name, "fingerprint": pipeline.fingerprints["template"]},
            **({} if expander is None else {"images": expander.rule.as_json()}),
            "policy": {"name": pipeline.policy.name, "fingerprint": pipeline.fingerprints["policy"]},
            "splits": {name: dict(split) for name, split in splits.items()},
            "ledger": ledger.as_json(),
            "files": {path: file.to_json() for path, file in sorted(files.items())},
        }
        return sealed(content)

    def _splits(self, receipts: Sequence[Receipt], ledger: Ledger) -> dict[str, EpisodeManifest]:
        """Make the manifests of splits with episodes; remove the empty shards of others."""
        manifests: dict[str, EpisodeManifest] = {}
        for split in sorted({split for receipt in receipts for split in receipt["splits"]}):
            shards = [shard_from_json(receipt["splits"][split], CHUNKS) for receipt in receipts]
            if len(shards) > 1:
                shards = [replace(shard, name=shard_name(number)) for number, shard in enumerate(shards)]
            if any(shard.episodes for shard in shards):
                columns = tuple(column for column in COLUMNS if column.file in shards[0].files)
                manifests[split] = manifest_of_shards(split, columns, shards)
            else:
                remove_path(self.directory / split)
        if not manifests:
            reasons = reason_lines(ledger.reasons("quarantined", "skipped"), _first_examples(receipts))
            raise DataError(f"no record of the input could be built: there is no dataset to write{reasons}")
        return manifests

    def _with_rows(
        self, manifests: Mapping[str, EpisodeManifest]
    ) -> tuple[dict[str, EpisodeManifest], dict[str, dict[str, Any]]]:
        """Plan packed rows; return the manifests with them, and each split's entry in the dataset manifest."""
        splits: dict[str, EpisodeManifest] = {}
        summaries: dict[str, dict[str, Any]] = {}
        pack = self.recipe.pack
        for name, split in manifests.items():
            splits[name], summaries[name] = split, {"episodes": split.episodes, "tokens": split.tokens}
            if BRANCHES.name in split.columns:  # two numbers of four bytes each
                summaries[name]["branches"] = sum(shard.files[BRANCHES.file].bytes for shard in split.shards) // 8
            if pack is not None:
                assert pack.length is not None
                folders = [self.directory / name / shard.name for shard in split.shards]
                lengths = np.concatenate([np.fromfile(folder / INDEX, "<u8")[1::2] for folder in folders])
                rows = plan(lengths.astype(np.int64), pack.length, pack.strategy)
                stated = PackedRows(length=rows.capacity, strategy=str(rows.strategy), count=rows.bins)
                splits[name] = replace(split, rows=stated)
                summaries[name] |= {"rows": len(rows), "padding": rows.padding, "lower_bound": rows.lower_bound}
                summaries[name]["fill"] = rows.fill
        return splits, summaries

    def _ledger(self, receipts: Mapping[int, Receipt]) -> Ledger:
        ledger = Ledger()
        named: dict[str, list[str]] = {}
        for number in sorted(receipts):
            ledger.add(Ledger.from_json(receipts[number]["ledger"]))
            for gate, names in receipts[number]["named"].items():
                named[gate] = [*named.get(gate, []), *names][:NAMED]
        for source, count in self.planned.capped.items():
            ledger.notes[source, "records_beyond_max_records"] += count
        reasons = _first_examples([receipts[number] for number in sorted(receipts)])
        check_gates(self.recipe.gates, ledger, CHANGE_GATE, named, reasons)
        return ledger


CHANGE_GATE = "With a changed gate alone, --resume continues from here."


def _first_examples(receipts: Sequence[Receipt]) -> dict[str, str]:
    """Return the first record that was left out for each reason, in words."""
    return {code: words for receipt in reversed(receipts) for code, words in receipt["left_out"].items()}
