"""Token files against megatron-core's IndexedDataset, both ways; only where megatron-core is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from framework.data.tokens import TokenFile, write_tokens

indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "uint16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ours_reads_what_megatron_writes(tmp_path: Path, dtype: str) -> None:
    documents = [np.arange(n, 2 * n) for n in (5, 1, 40)]
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    builder.add_document(torch.from_numpy(documents[0]), [2, 3])  # a document of two sequences
    for document in documents[1:]:
        builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    file = TokenFile(str(tmp_path / "theirs"))
    assert file.dtype == np.dtype(dtype)
    assert file.document_starts.tolist() == [0, 5, 6]
    assert file.read(0, file.num_tokens).tolist() == np.concatenate(documents).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_megatron_reads_what_ours_writes(tmp_path: Path, dtype: str) -> None:
    documents = [np.arange(n, 2 * n) for n in (5, 1, 40)]
    write_tokens(tmp_path / "ours", documents, np.dtype(dtype))
    theirs = indexed.IndexedDataset(str(tmp_path / "ours"))
    assert len(theirs) == 3
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    for number, document in enumerate(documents):
        assert theirs[number].dtype == np.dtype(dtype)
        assert theirs[number].tolist() == document.tolist()


@pytest.mark.parametrize("vocab_size", [256, 65_499, 65_500, 131_072])
def test_the_dtype_rule_is_the_same(vocab_size: int) -> None:
    from framework.data.tokens import dtype_for

    assert np.dtype(indexed.DType.optimal_dtype(vocab_size)) == dtype_for(vocab_size)
