"""Where a reader leaves the documents that it found."""

import json
import sys
from pathlib import Path

from tests.export.sets import Document


def written(documents: list[Document]) -> None:
    """Write them to the file that the command line names."""
    plain = [([int(i) for i in ids], [int(place) for place in places]) for ids, places in documents]
    Path(sys.argv[2]).write_text(json.dumps(plain))
