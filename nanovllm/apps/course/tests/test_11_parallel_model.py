import pytest
import torch
from nanovllm.apps.course.solution.engine import Engine
from nanovllm.apps.course.solution.parallel_model import (
    ParallelModel,
    all_reduce,
    column_parallel,
    row_parallel,
)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_parts_of_columns_are_the_product_side_by_side(num_ranks):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 6), torch.randn(8, 6)
    parts = column_parallel(x, weight, num_ranks)
    assert [part.shape for part in parts] == [(3, 8 // num_ranks)] * num_ranks
    torch.testing.assert_close(torch.cat(parts, dim=1), x @ weight.T)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_summands_of_rows_add_up_to_the_product(num_ranks):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8), torch.randn(6, 8)
    summands = row_parallel(list(x.chunk(num_ranks, dim=1)), weight)
    assert [summand.shape for summand in summands] == [(3, 6)] * num_ranks
    torch.testing.assert_close(all_reduce(summands), x @ weight.T)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_tokens_are_those_of_the_library(prompts, library, num_ranks):
    model = ParallelModel()
    model.num_ranks = num_ranks
    assert Engine(model).generate(prompts, 6) == library(prompts, 6)
    assert model.num_sums >= 6 * model.num_layers
