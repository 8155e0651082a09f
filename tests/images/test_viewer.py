"""The viewer shows pictures as pictures: small copies from the folder of the build, or from the dataset."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.images.model_folders import picture
from tests.images.test_llamafactory import built
from tests.view.sets import running

WIDE, TURNED = picture(64, 200), picture(1200, 700, "JPEG", 6)


@pytest.mark.parametrize(("stores", "packs"), [(False, True), (True, False)])
def test_pictures_are_shown_small(stores: bool, packs: bool, tmp_path: Path) -> None:
    packing = {"pack": {"strategy": "best_fit"}, "packing": {"max_length": 2048}} if packs else {}
    data = built(tmp_path, {"wide.png": WIDE, "turned.jpg": TURNED}, store_images=stores, **packing)
    with running(data) as found:
        first = next(iter(found.viewer.looks))
        pages = [f"/{first}/train/{number}" for number in range(1 if packs else 3)]
        texts = [b"".join(part.encode() for part in found.viewer.answer(page, {}).body).decode() for page in pages]
        assert sum(text.count("<img ") for text in texts) == 2
        assert any("[image 200x64, " in text for text in texts)
        assert not any("&lt;|image_pad|&gt;" in text for text in texts)
        page = pages[-1]
        small = [found.viewer.answer(f"{page}/picture", {"n": str(number)}) for number in range(2 if packs else 1)]
        assert all(one.kind == "image/png" for one in small)
        sizes = {Image.open(io.BytesIO(one.body)).size for one in small}
        assert (320, 187) in sizes  # turned as EXIF says
        assert found.viewer.answer(f"{page}/picture", {"n": "9"}).status == 404
        if not stores:
            (tmp_path / "turned.jpg").write_bytes(WIDE)
            statuses = {found.viewer.answer(f"{page}/picture", {"n": str(number)}).status for number in range(2)}
            assert 400 in statuses
