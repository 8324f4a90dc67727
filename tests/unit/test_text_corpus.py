"""The demo's corpus is read back unchanged by Megatron's own reader."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.text_corpus import (
    END_OF_DOCUMENT,
    VOCAB_SIZE,
    build_corpus,
    docstrings,
    select_documents,
)

MEGABYTES = 0.3


@pytest.fixture(scope="module")
def texts() -> list[bytes]:
    return select_documents(int(MEGABYTES * 1_000_000))


def test_documents_round_trip_through_megatron_reader(
    megatron: Any, tmp_path: Path, texts: list[bytes]
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    info = build_corpus(tmp_path, MEGABYTES)
    dataset = IndexedDataset(info.prefix)
    assert len(dataset) == len(dataset.document_indices) - 1 == info.documents == len(texts)
    assert sum(dataset.sequence_lengths) == info.tokens
    for document, text in enumerate(texts):
        tokens = dataset[document]
        assert tokens[-1] == END_OF_DOCUMENT
        assert tokens[:-1].astype(np.uint8).tobytes() == text
        assert tokens.max() < VOCAB_SIZE


def test_size_is_close_to_the_cap_and_documents_differ(texts: list[bytes]) -> None:
    total = sum(map(len, texts))
    assert 0.7 * MEGABYTES * 1e6 < total <= MEGABYTES * 1e6
    assert len(set(texts)) == len(texts)


def test_selection_is_repeatable_and_a_prefix_of_a_larger_one(texts: list[bytes]) -> None:
    larger = select_documents(int(1.5 * MEGABYTES * 1_000_000))
    assert larger[: len(texts)] == texts
    assert len(larger) > len(texts)


def test_held_out_documents_are_those_of_megatron_split(megatron: Any, tmp_path: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    info = build_corpus(tmp_path, MEGABYTES)
    ratios = parse_and_normalize_split(info.split)
    train, held_out, test = convert_split_vector_to_split_matrix(ratios)
    assert test is None
    assert train[1] == held_out[0]
    start, end = (round(bound * info.documents) for bound in held_out)
    assert end - start == info.held_out_documents > 0


def test_a_second_call_reuses_the_corpus_and_another_size_rebuilds(
    megatron: Any, tmp_path: Path
) -> None:
    first = build_corpus(tmp_path, MEGABYTES)
    index = Path(f"{first.prefix}.idx")
    os.utime(index, (0, 0))
    assert build_corpus(tmp_path, MEGABYTES) == first
    assert index.stat().st_mtime == 0
    assert build_corpus(tmp_path, MEGABYTES / 2).tokens < first.tokens
    assert index.stat().st_mtime > 0


def test_interrupted_build_is_repeated(megatron: Any, tmp_path: Path) -> None:
    first = build_corpus(tmp_path, MEGABYTES)
    (tmp_path / "corpus.json").unlink()
    Path(f"{first.prefix}.bin").write_bytes(b"half")
    assert build_corpus(tmp_path, MEGABYTES) == first
    assert Path(f"{first.prefix}.bin").stat().st_size == 2 * first.tokens


def test_docstrings_are_taken_from_modules_classes_and_functions() -> None:
    source = b'"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
    assert docstrings(source) == b"Module.\n\n\nA\n\nClass.\n\n\nf\n\nMethod.\n"
