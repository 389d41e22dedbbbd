"""Pages of inference servers, as their documentation shows them, become services; the site has their sum."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.prometheus import PageDecoder
from connectors.series import Sums
from connectors.series_map import load_map
from tests.support.builders import site_of, two_racks
from tests.unit.test_prometheus import cells
from twin.catalogue import NS

T = 1_700_000_000 * NS
SITE = site_of(two_racks(services=[{"name": "chat"}, {"name": "code"}]))
L = 'model_name="chat",engine="0"'
Page = dict[str, float]

VLLM: Page = {
    f"vllm:num_requests_running{{{L}}}": 8, f"vllm:num_requests_waiting{{{L}}}": 3,
    f"vllm:kv_cache_usage_perc{{{L}}}": 0.42,
    f'vllm:request_success_total{{{L},finished_reason="stop"}}': 100,
    f"vllm:prompt_tokens_total{{{L}}}": 5000, f"vllm:generation_tokens_total{{{L}}}": 9000,
    f'vllm:time_to_first_token_seconds_bucket{{{L},le="0.1"}}': 50,
    f"vllm:time_to_first_token_seconds_sum{{{L}}}": 20,
    f"vllm:time_to_first_token_seconds_count{{{L}}}": 100,
    f"vllm:e2e_request_latency_seconds_sum{{{L}}}": 300,
    f"vllm:e2e_request_latency_seconds_count{{{L}}}": 100,
}  # fmt: skip
VLLM_LATER = VLLM | {
    f'vllm:request_success_total{{{L},finished_reason="stop"}}': 160,
    f'vllm:request_success_total{{{L},finished_reason="length"}}': 30,  # its first of this kind
    f"vllm:prompt_tokens_total{{{L}}}": 8000, f"vllm:generation_tokens_total{{{L}}}": 12000,
    f"vllm:time_to_first_token_seconds_sum{{{L}}}": 38,
    f"vllm:time_to_first_token_seconds_count{{{L}}}": 190,
    f"vllm:e2e_request_latency_seconds_sum{{{L}}}": 480,
    f"vllm:e2e_request_latency_seconds_count{{{L}}}": 190,
}  # fmt: skip
S = 'model_name="chat",engine_type="unified",tp_rank="{}",pp_rank="0"'
SGLANG: Page = {
    f"sglang:{name}{{{S.format(rank)}}}": value
    for rank in (0, 1)
    for name, value in (("num_running_reqs", 8), ("num_queue_reqs", 3), ("token_usage", 0.42),
                        ("num_requests_total", 100), ("prompt_tokens_total", 5000),
                        ("generation_tokens_total", 9000), ("time_to_first_token_seconds_sum", 20),
                        ("time_to_first_token_seconds_count", 100), ("e2e_request_latency_seconds_sum", 300),
                        ("e2e_request_latency_seconds_count", 100))
}  # fmt: skip
LATER = {"num_requests_total": 190, "prompt_tokens_total": 8000, "generation_tokens_total": 12000,
         "time_to_first_token_seconds_sum": 38, "time_to_first_token_seconds_count": 190,
         "e2e_request_latency_seconds_sum": 480, "e2e_request_latency_seconds_count": 190}  # fmt: skip
SGLANG_LATER = SGLANG | {f"sglang:{n}{{{S.format(r)}}}": float(v) for r in (0, 1) for n, v in LATER.items()}
M = 'model="chat",version="1"'
TRITON: Page = {
    f"nv_inference_request_success{{{M}}}": 100, f"nv_inference_pending_request_count{{{M}}}": 3,
    f"nv_inference_request_duration_us{{{M}}}": 300e6,
    f'nv_trt_llm_request_metrics{{{M},request_type="active"}}': 8,
    f'nv_trt_llm_request_metrics{{{M},request_type="max"}}': 256,
    f'nv_trt_llm_kv_cache_block_metrics{{{M},kv_cache_block_type="fraction"}}': 0.42,
    f'nv_trt_llm_kv_cache_block_metrics{{{M},kv_cache_block_type="used"}}': 420,
}  # fmt: skip
TRITON_LATER = TRITON | {
    f"nv_inference_request_success{{{M}}}": 190.0,
    f"nv_inference_request_duration_us{{{M}}}": 480e6,
}
D = 'model="chat"'
R = f'{D},endpoint="chat_completions",request_type="stream",status="success"'
DYNAMO: Page = {
    f"dynamo_frontend_requests_total{{{R}}}": 100, f"dynamo_frontend_inflight_requests{{{D}}}": 8,
    f"dynamo_frontend_queued_requests{{{D}}}": 3, f"dynamo_frontend_input_sequence_tokens_sum{{{D}}}": 5000,
    f"dynamo_frontend_output_sequence_tokens_sum{{{D}}}": 9000,
    f"dynamo_frontend_time_to_first_token_seconds_sum{{{D}}}": 20,
    f"dynamo_frontend_time_to_first_token_seconds_count{{{D}}}": 100,
    f"dynamo_frontend_request_duration_seconds_sum{{{D}}}": 300,
    f"dynamo_frontend_request_duration_seconds_count{{{D}}}": 100,
}  # fmt: skip
DYNAMO_LATER = DYNAMO | {
    f"dynamo_frontend_requests_total{{{R}}}": 190, f"dynamo_frontend_input_sequence_tokens_sum{{{D}}}": 8000,
    f"dynamo_frontend_output_sequence_tokens_sum{{{D}}}": 12000,
    f"dynamo_frontend_time_to_first_token_seconds_sum{{{D}}}": 38,
    f"dynamo_frontend_time_to_first_token_seconds_count{{{D}}}": 190,
    f"dynamo_frontend_request_duration_seconds_sum{{{D}}}": 480,
    f"dynamo_frontend_request_duration_seconds_count{{{D}}}": 190,
}  # fmt: skip
PAGES = {"vllm": (VLLM, VLLM_LATER), "sglang": (SGLANG, SGLANG_LATER),
         "triton": (TRITON, TRITON_LATER), "dynamo": (DYNAMO, DYNAMO_LATER)}  # fmt: skip
WANTED = {"requests_per_s": 6.0, "running_request_count": 8, "waiting_request_count": 3,
          "kv_cache_used_pu": 0.42, "prompt_tokens_per_s": 200, "generated_tokens_per_s": 200,
          "first_token_s": 0.2, "latency_s": 2.0}  # fmt: skip
LACKS = {"triton": ("prompt_tokens_per_s", "generated_tokens_per_s", "first_token_s"),
         "dynamo": ("kv_cache_used_pu",)}  # fmt: skip


def text(page: Page) -> bytes:
    return "".join(f"{series} {value}\n" for series, value in page.items()).encode()


def decoder(name: str, place: str | None = None, sums: Sums | None = None) -> PageDecoder:
    return PageDecoder(SITE, *load_map(name), place, sums)


def read(d: PageDecoder, page: Page, at_s: float) -> dict[tuple[str, int, str], Any]:
    found = cells(d.decode(text(page), T + round(at_s * NS)))
    return {cell: None if value != value else value for cell, value in found.items()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_becomes_a_service_and_its_requests_the_sites(name: str) -> None:
    first, later = PAGES[name]
    mine = decoder(name)
    begun = read(mine, first, 0.0)
    assert begun["service", 0, "requests_per_s"] is None  # of one page nobody knows a rate
    assert begun["service", 0, "waiting_request_count"] == 3
    found = read(mine, later, 15.0)
    for signal, value in WANTED.items():
        if signal not in LACKS.get(name, ()):
            assert found.pop(("service", 0, signal)) == pytest.approx(value), signal
    assert found == {("site", 0, "requests_per_s"): pytest.approx(6.0)}
    assert not mine.faults.take()


def test_replicas_are_summed_and_the_fullest_counts() -> None:
    sums = Sums()
    one, two = (decoder("vllm", "lab/chat", sums) for _ in range(2))
    other = decoder("vllm", "lab/code", sums)
    full = {f"vllm:kv_cache_usage_perc{{{L}}}": 0.9}
    for at_s, page in ((0.0, VLLM), (15.0, VLLM_LATER)):
        for n, mine in enumerate((one, two, other)):
            found = read(mine, page | (full if n == 1 else {}), at_s + n)
    # a place names the service, whatever the model's name is
    assert found["service", 1, "requests_per_s"] == pytest.approx(6.0)
    assert found["site", 0, "requests_per_s"] == pytest.approx(18.0)
    found = read(one, VLLM_LATER, 30.0)
    assert found["service", 0, "running_request_count"] == 16
    assert found["service", 0, "kv_cache_used_pu"] == pytest.approx(0.9)
    assert found["service", 0, "requests_per_s"] == pytest.approx(6.0)  # one stood still, the other not
    # the other replicas are silent: a sum of some is no sum, until they are gone for good
    found = read(one, VLLM_LATER, 120.0)
    assert found["site", 0, "requests_per_s"] is None
    assert found["service", 0, "running_request_count"] is None
    found = read(one, VLLM_LATER, 700.0)
    assert found["service", 0, "running_request_count"] == 8


def test_a_sum_waits_for_all_that_may_have_a_part() -> None:
    sums = Sums()
    one, two = (decoder("vllm", "lab/chat", sums) for _ in range(2))
    read(one, VLLM, 0.0)
    assert read(one, VLLM_LATER, 15.0)["service", 0, "running_request_count"] is None
    assert read(two, VLLM, 16.0)["service", 0, "running_request_count"] == 16
    alone = decoder("vllm", "lab/chat", Sums())
    assert read(alone, VLLM, 0.0)["service", 0, "running_request_count"] == 8


def test_a_server_that_begins_anew_counts_from_zero() -> None:
    mine = decoder("vllm")
    read(mine, VLLM_LATER, 0.0)
    found = read(mine, VLLM, 10.0)
    assert found["service", 0, "requests_per_s"] == pytest.approx(100 / 10)
    assert found["service", 0, "latency_s"] == pytest.approx(3.0)


def test_no_request_has_no_latency() -> None:
    mine = decoder("vllm")
    read(mine, VLLM, 0.0)
    found = read(mine, VLLM, 15.0)
    assert found["service", 0, "requests_per_s"] == 0.0
    assert found["service", 0, "latency_s"] is None


def test_a_model_that_is_no_service_is_told_and_counts_for_the_site() -> None:
    mine = decoder("vllm")
    pages = [{s.replace('"chat"', '"org/new"'): v for s, v in page.items()} for page in PAGES["vllm"]]
    read(mine, pages[0], 0.0)
    found = read(mine, pages[1], 15.0)
    assert found == {("site", 0, "requests_per_s"): pytest.approx(6.0)}
    assert mine.strangers.take()[0][0] == "no service 'org/new' in the site file"
