import pytest
from nanovllm.apps.course.solution.roofline import (
    QWEN3_0_6B,
    QWEN3_8B,
    Device,
    Shape,
    bytes_of_step,
    kv_bytes_per_token,
    layer_parameters,
    operations_of_step,
    seconds_of_step,
)

from nanovllm.apps.bench.roofline import roofline
from nanovllm.apps.course import recorded

H200 = Device(bandwidth=4.3e12, flops=790e12)
TINY = Shape(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=640, vocab=4096)
SHAPES = {"qwen3-0.6b": QWEN3_0_6B, "qwen3-8b": QWEN3_8B}


def test_parameters_are_those_of_the_tiny_model(model):
    found = sum(
        weight.numel() for name, weight in model.weights.items() if name.endswith("proj.weight")
    )
    assert layer_parameters(TINY) == found


def test_bytes_of_keys_and_values():
    assert kv_bytes_per_token(TINY) == 2048  # half of chapter 2's, which are in float32
    assert kv_bytes_per_token(QWEN3_0_6B) == 114688
    assert kv_bytes_per_token(QWEN3_8B) == 147456


def test_a_decode_step_reads_all_weights_once_and_the_cache_of_each_sequence():
    weights = bytes_of_step(QWEN3_8B, [])
    assert weights == 2 * (layer_parameters(QWEN3_8B) + 4096 * 151936)
    assert bytes_of_step(QWEN3_8B, [(99, 1)]) == weights + 100 * kv_bytes_per_token(QWEN3_8B)
    assert bytes_of_step(QWEN3_8B, [(99, 1), (9, 1)]) == weights + 110 * 147456
    assert bytes_of_step(QWEN3_8B, [(90, 10)]) == weights + 100 * 147456


def test_operations_of_attention_grow_with_the_context():
    one, two = (operations_of_step(TINY, [(start, 1)]) for start in (0, 1))
    assert two - one == 4 * 4 * 4 * 64  # in 4 layers and 4 heads, 64 products with k and v each
    whole = operations_of_step(TINY, [(0, 10)])
    parts = [operations_of_step(TINY, [(start, 1)]) for start in range(10)]
    assert sum(parts) - whole == 9 * 2 * 256 * 4096  # the head, for nine tokens more


@pytest.mark.parametrize("name", SHAPES)
def test_steps_add_up_to_the_roofline_of_the_library(name):
    def library(num_seqs, prompt, output):
        work = [([0] * prompt, output)] * num_seqs
        return roofline(name, work, "long", H200.bandwidth, H200.flops)

    for num_seqs, prompt in ((1, 64), (8, 500), (64, 100)):
        step = library(num_seqs, prompt, 12) - library(num_seqs, prompt, 11)
        mine = seconds_of_step(SHAPES[name], H200, [(prompt + 10, 1)] * num_seqs)
        assert mine == pytest.approx(step, rel=1e-6)
    prefill = seconds_of_step(SHAPES[name], H200, [(0, 2048)] * 64)
    assert prefill == pytest.approx(library(64, 2048, 1), rel=1e-3)


def test_few_rows_wait_for_memory_and_many_for_operations():
    short = Device(bandwidth=1e12, flops=1e30), Device(bandwidth=1e30, flops=1e12)
    for chunks in ([(0, 500)], [(100, 1)] * 7):
        times = [seconds_of_step(QWEN3_8B, device, chunks) for device in short]
        assert times[0] == pytest.approx(bytes_of_step(QWEN3_8B, chunks) / 1e12)
        assert times[1] == pytest.approx(operations_of_step(QWEN3_8B, chunks) / 1e12)


@pytest.mark.parametrize("name", SHAPES)
def test_no_measured_step_beats_the_roofline(name):
    figures = recorded.figures()
    device = Device(figures["bandwidth"], figures["flops"])
    for step in recorded.decode_times(name):
        assert step.seconds > seconds_of_step(SHAPES[name], device, step.chunks)
