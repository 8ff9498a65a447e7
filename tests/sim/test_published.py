"""The published comparison of five layouts, simulated: 1,024 random prompts, four nodes with EFA.

Output lengths swept at input 512, input lengths swept at output 256. Each published ordering has a
test; where a simulation does not show one for all lengths, the test's lengths say for which.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import pytest

from pdrt.sim.arrangement import named
from pdrt.sim.cost import load
from pdrt.sim.run import simulate
from pdrt.sim.tally import Tally
from pdrt.sim.workload import Workload

LAYOUTS: Final = ("dp", "route2", "route4", "1P3D", "2P2D")
INPUTS: Final = (256, 512, 1024, 2048, 4096)  # at output 256
OUTPUTS: Final = (256, 512, 1024, 2048)  # at input 512
APART: Final = ("1P3D", "2P2D")
prefill_heavy = pytest.mark.parametrize("input_len", INPUTS)
decode_heavy = pytest.mark.parametrize("output_len", OUTPUTS)


@cache
def tally(layout: str, input_len: int, output_len: int) -> Tally:
    cost = load("efa-deepseek-v2-lite")
    return simulate(cost, named(layout, 4), Workload.of(1024, input_len, output_len)).tally


def throughput(layout: str, input_len: int, output_len: int) -> float:
    """Requests a second; of fixed lengths output tokens a second are in proportion."""
    found = tally(layout, input_len, output_len)
    assert len(found.answers) == 1024
    return 1024 / found.seconds


def ttft(layout: str, input_len: int, output_len: int) -> float:
    answers = tally(layout, input_len, output_len).answers
    return sum(one.ttft_s for one in answers) / len(answers)


def itl_ms(layout: str, input_len: int, output_len: int) -> float:
    spread = tally(layout, input_len, output_len).itl()
    assert spread is not None
    return spread["mean"]


def others(layout: str) -> list[str]:
    return [name for name in LAYOUTS if name != layout]


def check_route4_has_the_highest_throughput(input_len: int, output_len: int) -> None:
    best = throughput("route4", input_len, output_len)
    assert all(throughput(each, input_len, output_len) < best for each in others("route4"))


def check_ttft_apart_is_worse_than_route4s(input_len: int, output_len: int) -> None:
    least = ttft("route4", input_len, output_len)
    assert all(ttft(each, input_len, output_len) > least for each in APART)


def test_route4_has_the_highest_throughput_at_long_outputs() -> None:
    check_route4_has_the_highest_throughput(512, 1024)


def test_prefill_apart_has_a_later_first_token_than_route4() -> None:
    check_ttft_apart_is_worse_than_route4s(512, 1024)


def test_1p3d_collapses_at_long_inputs() -> None:
    """Its only prefill worker has to compute all prompts: TTFT exceeds 37 s."""
    assert 37.0 < ttft("1P3D", 4096, 256) < 45.0
    assert throughput("1P3D", 4096, 256) < throughput("route4", 4096, 256) / 2


def test_1p3d_has_short_gaps_at_long_inputs() -> None:
    """About 10 ms, for a prefill worker feeds three decode workers with small batches only."""
    assert 7.0 < itl_ms("1P3D", 4096, 256) < 13.0 < itl_ms("route4", 4096, 256)


def test_2p2d_has_the_lowest_throughput_at_long_outputs_and_1p3d_the_second_highest() -> None:
    ranked = sorted(LAYOUTS, key=lambda each: throughput(each, 512, 1024))
    assert ranked[0] == "2P2D"
    assert ranked[-2:] == ["1P3D", "route4"]


def check_gaps_are_as_long_as_published(output_len: int) -> None:
    assert 25.0 < itl_ms("route4", 512, output_len) < 29.0
    assert 26.0 < itl_ms("1P3D", 512, output_len) < 35.0
    assert 45.0 < itl_ms("dp", 512, output_len) < 50.0
    assert 45.0 < itl_ms("2P2D", 512, output_len) < 50.0


def test_gaps_at_long_outputs_are_as_long_as_published() -> None:
    check_gaps_are_as_long_as_published(1024)


@pytest.mark.slow
@pytest.mark.timeout(240)
class TestOverAllLengths:
    @prefill_heavy
    def test_route4_has_the_highest_throughput_over_inputs(self, input_len: int) -> None:
        check_route4_has_the_highest_throughput(input_len, 256)

    @decode_heavy
    def test_route4_has_the_highest_throughput_over_outputs(self, output_len: int) -> None:
        check_route4_has_the_highest_throughput(512, output_len)

    @prefill_heavy
    def test_route4_has_the_earliest_first_token_over_inputs(self, input_len: int) -> None:
        least = ttft("route4", input_len, 256)
        assert all(ttft(each, input_len, 256) > least for each in others("route4"))

    @decode_heavy
    def test_prefill_apart_has_a_later_first_token_over_outputs(self, output_len: int) -> None:
        check_ttft_apart_is_worse_than_route4s(512, output_len)

    @prefill_heavy
    def test_1p3d_has_the_lowest_gaps_over_inputs(self, input_len: int) -> None:
        least = itl_ms("1P3D", input_len, 256)
        assert all(itl_ms(each, input_len, 256) > least for each in others("1P3D"))

    @decode_heavy
    def test_2p2d_has_the_lowest_throughput_over_outputs(self, output_len: int) -> None:
        least = throughput("2P2D", 512, output_len)
        assert all(throughput(each, 512, output_len) > least for each in others("2P2D"))

    @decode_heavy
    def test_gaps_over_outputs_are_as_long_as_published(self, output_len: int) -> None:
        check_gaps_are_as_long_as_published(output_len)

    @decode_heavy
    def test_1p3d_has_the_second_highest_throughput_over_outputs(self, output_len: int) -> None:
        ranked = sorted(LAYOUTS, key=lambda each: throughput(each, 512, output_len))
        assert ranked[-2:] == ["1P3D", "route4"]

    @pytest.mark.parametrize("output_len", [256, 512])
    def test_1p3ds_first_token_is_1_to_2_s_behind_baselines(self, output_len: int) -> None:
        behind = ttft("1P3D", 512, output_len) - ttft("dp", 512, output_len)
        assert 1.0 < behind < 2.0

    def test_1p3d_is_last_at_long_inputs_and_its_gaps_a_fraction_of_baselines(self) -> None:
        assert throughput("1P3D", 4096, 256) == min(throughput(e, 4096, 256) for e in LAYOUTS)
        assert itl_ms("dp", 4096, 256) > 5 * itl_ms("1P3D", 4096, 256)

    def test_1p3ds_request_throughput_drops_with_the_input(self) -> None:
        ranked = [throughput("1P3D", input_len, 256) for input_len in INPUTS]
        assert ranked == sorted(ranked, reverse=True)
        assert ranked[-1] < ranked[1] / 6

    @decode_heavy
    def test_1p3ds_gaps_are_a_fraction_of_baselines_over_outputs(self, output_len: int) -> None:
        assert 1.4 < itl_ms("dp", 512, output_len) / itl_ms("1P3D", 512, output_len) < 2.4
