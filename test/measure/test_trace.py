"""The analysis of a trace, on traces that are written down and on a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashrt_ros.measure.errors import MeasureError
from flashrt_ros.measure.timeline import draw_layers, lanes, short_name
from flashrt_ros.measure.trace import Span, busy, by_name, figures, one_layer, traced


def spans(*parts: tuple[str, float, float]) -> list[Span]:
    return [Span(name, start, duration) for name, start, duration in parts]


def row(*names: str) -> list[Span]:
    """Spans of these names, one microsecond long, back to back."""
    return [Span(name, float(index), 1.0) for index, name in enumerate(names)]


def test_figures_of_a_small_trace() -> None:
    found = figures(
        spans(
            ("nvjet_tst_64x8", 0, 10),
            ("rms_norm", 12, 3),
            ("Memcpy DtoD (Device -> Device)", 15, 1),
            ("sm90_xmma_gemm_bf16", 20, 5),
        )
    )
    assert (found.kernels, found.gemms) == (3, 2)
    assert found.others_per_gemm == 0.5
    assert found.kernel_ms == pytest.approx(0.018)
    assert found.gemm_ms == pytest.approx(0.015)
    assert found.gap_ms == pytest.approx(0.006)
    assert found.span_ms == pytest.approx(0.025)


def test_overlapping_spans_are_busy_once() -> None:
    assert busy(spans(("a", 0, 10), ("b", 5, 10), ("c", 7, 1), ("d", 20, 1))) == 16


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_tst_128x64_64x8_1x2_h_bz_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16>(…)",
        "aten::linear",
        "expert",
    ],
)
def test_matrix_products_are_known_by_name(name: str) -> None:
    assert Span(name, 0, 1).is_gemm


@pytest.mark.parametrize(
    "name",
    [
        "layer_norm",
        "void at::native::vectorized_elementwise_kernel<4>",
        "aten::mul",
        "image_attention_wgmma",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256_4x1x1_cga1x1x1_kernel0_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, cutlass::gemm>>(Params)",
        "fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::gemm>)",
    ],
)
def test_other_kernels_are_not_taken_for_products(name: str) -> None:
    assert not Span(name, 0, 1).is_gemm


def test_kernels_that_run_beside_each_other_have_lanes_of_their_own() -> None:
    beside = spans(("gemm", 0, 10), ("attention", 2, 9), ("norm", 9, 4), ("gemm", 11, 5), ("act", 16, 1))
    assert lanes(beside) == [0, 1, 2, 0, 0]
    assert lanes(row("norm", "gemm", "act")) == [0, 0, 0]
    assert lanes([]) == []


def test_kernels_by_name_are_sorted_by_their_time() -> None:
    assert by_name(spans(("a", 0, 1), ("b", 1, 5), ("a", 6, 1))) == [("b", 1, 0.005), ("a", 2, 0.002)]


def test_one_layer_is_the_shortest_sequence_that_comes_again() -> None:
    layer = ("norm", "gemm", "norm", "gemm", "act")
    found = one_layer(row("begin", *layer * 4, "end"))
    assert sorted(span.name for span in found) == sorted(layer)
    assert len(found) == 5


def test_equal_kernels_in_a_row_are_no_layer() -> None:
    names = ("copy",) * 9 + ("gemm", "norm", "act") * 3
    assert {span.name for span in one_layer(row(*names))} == {"gemm", "norm", "act"}


def test_a_trace_without_layers_is_shown_whole() -> None:
    whole = row("expert")
    assert one_layer(whole) == whole


def test_a_real_trace_holds_what_was_called() -> None:
    x = torch.ones(64, 64)
    with torch.inference_mode():
        found = traced(lambda: (x @ x).relu(), torch.device("cpu"))
    names = [span.name for span in found]
    assert names.index("aten::matmul") < names.index("aten::relu")
    assert "aten::mm" not in names
    assert found[0].duration > 0


def test_a_trace_of_nothing_is_refused() -> None:
    with pytest.raises(MeasureError, match="saw no kernels"):
        traced(lambda: None, torch.device("cpu"))


def test_the_picture_is_a_png_with_a_line_for_each_row(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "layer.png"
    draw_layers({"context": row("norm", "gemm"), "action": row("expert")}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, Foo>(int, Foo)", "vectorized_elementwise_kernel"),
        ("aten::linear", "linear"),
        ("void (anonymous namespace)::softmax(float*)", "softmax"),
        ("expert", "expert"),
    ],
)
def test_names_are_shortened_to_what_tells_them_apart(name: str, short: str) -> None:
    assert short_name(name) == short
