"""Percentiles by rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.bench.common.rank import quantile


def test_a_percentile_of_a_hundred_values_is_not_their_largest():
    values = list(range(1, 101))
    assert [quantile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2 and quantile([3.0, 1.0, 2.0], 0.99) == 3
    assert quantile([7.0], 0.0) == quantile([7.0], 0.5) == 7.0
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(1, 99))
def test_it_is_the_inverse_of_the_distribution(values, percent):
    found = quantile(values, percent / 100)
    assert found == np.percentile(values, percent, method="inverted_cdf")
