"""Cutting a slot into buckets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from models.weights.layout import ELEMENT_BYTES, TORCH_NAMES, TensorSpec, lay_out, plan_buckets

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(TORCH_NAMES)), SHAPES), min_size=1, max_size=30)


@given(SPECS, st.integers(1, 2000))
def test_buckets_are_the_file_end_to_end_and_aligned(tensors: list[tuple[str, tuple[int, ...]]], limit: int) -> None:
    layout = lay_out(TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors))
    buckets = plan_buckets(layout, limit)
    assert [item for bucket in buckets for item in bucket.tensors] == list(layout.tensors)
    assert buckets[0].start == layout.data_start
    assert buckets[-1].end == layout.file_bytes
    assert all(a.end == b.start for a, b in pairwise(buckets))
    for bucket in buckets:
        sized = [item for item in bucket.tensors if item.end > item.start]
        assert bucket.nbytes <= limit or len(sized) == 1
        for item in bucket.tensors:
            assert (item.start - bucket.start) % ELEMENT_BYTES[item.spec.dtype] == 0
    for bucket, after in pairwise(buckets):
        assert after.tensors[0].end - bucket.start > limit, "another tensor would have fitted"
