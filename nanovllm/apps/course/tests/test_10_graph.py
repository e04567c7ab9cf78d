import pytest
import torch
from nanovllm.apps.course.solution.graph import Graph, GraphedDecoder


def test_a_replay_computes_with_new_values():
    x, weight = torch.ones(3), torch.arange(9.0).view(3, 3)
    graph = Graph(lambda: (x @ weight).relu() + 1)
    assert graph.result.tolist() == [10, 13, 16]
    x.copy_(torch.tensor([1.0, 0.0, 0.0]))
    assert graph.replay().tolist() == [1, 2, 3]
    x.zero_()
    assert graph.replay() is graph.result
    assert graph.result.tolist() == [1, 1, 1]


def test_the_function_itself_runs_only_once():
    calls, x = [], torch.ones(2)

    def function():
        calls.append(1)
        return x * 2

    graph = Graph(function)
    for _ in range(5):
        graph.replay()
    assert len(calls) == 1


def test_views_and_operations_in_place_are_replayed():
    x, memory = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(6)

    def function():
        left, right = x.view(2, 2).unbind(0)
        memory[2:4].copy_(left * right)
        memory[0].add_(1)
        return memory.view(3, 2).sum(dim=1)

    graph = Graph(function)
    assert graph.result.tolist() == [1, 3 + 8, 0]
    x.fill_(2)
    assert graph.replay().tolist() == [2, 8, 0]
    assert graph.replay().tolist() == [3, 8, 0]
    assert memory.tolist() == [3, 0, 4, 4, 0, 0]


def test_an_operation_with_several_results_is_replayed():
    x = torch.tensor([1.0, 5.0, 3.0])

    def function():
        values, indices = x.topk(2)
        return values + indices

    graph = Graph(function)
    assert graph.result.tolist() == [6, 5]
    x.copy_(torch.tensor([9.0, 5.0, 3.0]))
    assert graph.replay().tolist() == [9, 6]


def test_a_branch_is_taken_once_and_for_all():
    """This is what a graph cannot do: look at a value and decide."""
    x = torch.ones(1)
    graph = Graph(lambda: x * 10 if x.item() > 0 else x * 100)
    x.fill_(-1)
    assert graph.replay().tolist() == [-10]


def test_tokens_are_those_of_the_library(model, prompts, library):
    decoder = GraphedDecoder(model)
    model.counts.clear()
    for prompt, expected in zip(prompts, library(prompts, 12)):
        assert decoder.generate(prompt, 12) == expected
    assert model.counts == []  # the model's code did not run again


def test_what_lies_behind_a_position_does_not_matter(model, prompts):
    decoder = GraphedDecoder(model)
    expected = decoder.generate(prompts[0], 6)
    decoder.k.fill_(50)
    decoder.v.fill_(-50)
    assert decoder.generate(prompts[0], 6) == expected


@pytest.mark.parametrize("max_len", [32, 100])
def test_the_number_of_operations_does_not_depend_on_the_length(model, max_len):
    count = len(GraphedDecoder(model).graph.operations)
    assert len(GraphedDecoder(model, max_len).graph.operations) == count > 100
