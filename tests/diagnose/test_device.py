"""A GPU that always has work: well used, held up by fp32 math or memory, or slow for a reason in its kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fastloop.records.plan import Finding, Verdict
from tests.diagnose.scenes import (
    BF16,
    NO_WORKERS,
    findings,
    gpt2_naive,
    gpt2_tuned,
    on_cpu,
    resnet50_naive,
    resnet50_resident,
    scene,
    with_trace,
)

WORKERS = {**NO_WORKERS, "num_workers": 4}


def test_naive_gpt2_is_busy_and_not_fast() -> None:
    (finding,) = findings(gpt2_naive(ceilings={"resident": 40.6}))
    assert finding.bottleneck == "fp32_math" and finding.share_pct == pytest.approx(100)
    for said in (
        "NVML 99.7 %",
        "tensor cores 0 % active",
        "36 TFLOP/s = 54 % of fp32's 67 and 3.7 % of bf16's 989",
        "nothing waits for data (with free data 1.00x, measured)",
    ):
        assert said in finding.why
    assert finding.patch == {"rungs": {"amp": {"enabled": True}}}
    assert finding.ceiling_gain_pct is None, "without a trace nobody knows which share the products have"
    (guessed,) = findings(gpt2_naive())
    assert "nothing waits for data;" in guessed.why and "measured" not in guessed.why


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"mfu": {"datasheet": 0.017, "dtype_in_use": 0.25}}, "fp32_math"),
        ({"mfu": {"datasheet": 0.017, "dtype_in_use": 0.24}}, "compute_bound"),
        ({"gpu": {"gr_active_pct": 99.0, "tensor_active_pct": 24.0}}, "fp32_math"),
        ({"gpu": {"gr_active_pct": 99.0, "tensor_active_pct": 26.0}}, "compute_bound"),
        ({"precision": "bf16-mixed", "peaks": BF16}, "compute_bound"),
        ({"peaks": {}, "precision": "32-true"}, "fp32_math"),
        ({"peaks": {}, "precision": None}, "compute_bound"),
        ({"mfu": {}}, "compute_bound"),
        ({"mfu": {}, "gpu": {"gr_active_pct": 99.0}}, "none"),
        ({"trail": None, "lead_ms": None, "gpu": {"tensor_active_pct": 0.0}}, "none"),
        ({"device": "cpu"}, "none"),
    ],
)
def test_what_makes_it_fp32_math(change: dict[str, Any], name: str) -> None:
    assert findings(gpt2_naive(**change))[0].bottleneck == name


def test_a_trace_of_the_products_gives_the_ceiling() -> None:
    seen = with_trace(gpt2_naive(mfu={}), 1578.8, {}, {"gemm": 1263.0, "elementwise": 315.8})
    (finding,) = findings(seen)
    assert finding.bottleneck == "fp32_math" and finding.ceiling_is_estimate
    assert finding.ceiling_gain_pct == pytest.approx(293, abs=2), "80 % of the step at 67/989 of its time"


def test_a_starved_gpu_is_not_blamed_for_its_arithmetic() -> None:
    seen = resnet50_naive(mfu={"datasheet": 0.008, "dtype_in_use": 0.3})
    assert [finding.bottleneck for finding in findings(seen)] == ["data_wait"]
    assert [finding.bottleneck for finding in findings(gpt2_naive(data_wait=150.0))] == ["fp32_math", "data_wait"]
    assert [finding.bottleneck for finding in findings(gpt2_naive(data_wait=160.0, loader=WORKERS))] == ["data_wait"]


def test_a_gap_and_slow_arithmetic_are_both_named() -> None:
    found = findings(gpt2_naive(validation=300.0))
    assert [finding.bottleneck for finding in found] == ["fp32_math", "validation"]
    assert sum(finding.share_pct or 0 for finding in found) == pytest.approx(100)


@pytest.mark.parametrize(
    "seen",
    [
        gpt2_tuned(),
        gpt2_tuned(trail=0.1),
        gpt2_tuned(mfu={"datasheet": 0.35}),
        gpt2_tuned(mfu={}, gpu={"gr_active_pct": 99.0, "tensor_active_pct": 60.0}),
    ],
    ids=["full", "reads its loss", "just", "tensor cores"],
)
def test_a_tuned_script_gets_no_advice(seen: Any) -> None:
    (finding,) = findings(seen)
    assert finding.bottleneck == "compute_bound" and finding.patch is None and finding.ceiling_gain_pct is None
    assert finding.why.startswith("the GPU is the limit and well used") and finding.why.endswith(
        "; no rung is worth trying"
    )


@pytest.mark.parametrize(
    ("gpu", "peaks", "name"),
    [
        ({"dram_active_pct": 55.0}, {}, "memory_bound"),
        ({"dram_active_pct": 54.0}, {}, "compute_bound"),
        ({"dram_active_pct": 53.8}, {"dram_tb_per_s": 4.8, "measured_copy_tb_per_s": 4.3}, "memory_bound"),
        ({"dram_active_pct": 53.7}, {"dram_tb_per_s": 4.8, "measured_copy_tb_per_s": 4.3}, "compute_bound"),
        ({"dram_active_pct": 80.0, "tensor_active_pct": 61.0}, {}, "compute_bound"),
        ({}, {}, "compute_bound"),
    ],
)
def test_what_makes_it_memory(gpu: dict[str, float], peaks: dict[str, float], name: str) -> None:
    seen = resnet50_resident(gpu={"gr_active_pct": 99.9, "tensor_active_pct": 20.0, **gpu}, peaks=peaks)
    assert findings(seen)[0].bottleneck == name


@pytest.mark.parametrize(
    ("change", "enabled", "patch"),
    [
        ({}, (), "layout"),
        ({"flops": {}}, (), "compile"),
        ({}, ("layout",), "compile"),
        ({"precision": "32-true", "peaks": {}}, (), "amp"),
        ({"precision": "32-true", "peaks": {}, "flops": {}}, (), "compile"),
        ({}, ("amp", "layout", "compile"), None),
        ({"evidence": {"model": {"compiled": True, "channels_last": True}}}, (), None),
    ],
)
def test_what_helps_against_memory(change: dict[str, Any], enabled: tuple[str, ...], patch: str | None) -> None:
    seen = resnet50_resident(**change)
    (finding,) = findings(seen, enabled)
    assert finding.bottleneck == "memory_bound" and "DRAM 55 % active" in finding.why
    assert finding.patch == (None if patch is None else {"rungs": {patch: {"enabled": True}}})
    if patch is None:
        assert "rung helps with this: " in finding.why and finding.why.endswith(
            "amp, layout, compile are on, or do not apply here"
        )


SLOW = {"mfu": {"datasheet": 0.2}, "gpu": {"gr_active_pct": 99.0, "tensor_active_pct": 20.0}}


@pytest.mark.parametrize(
    ("families", "enabled", "says", "patch"),
    [
        ({"optimizer": 40.0}, (), "the optimizer takes 33 % of that time", "fused"),
        ({"optimizer": 40.0}, ("fused",), "the optimizer takes 33 % of that time", "compile"),
        ({"attention": 60.0, "optimizer": 20.0}, (), "scaled_dot_product_attention", None),
        (
            {"elementwise": 20.0, "normalisation": 30.0},
            (),
            "elementwise work and normalization take 42 % of that time",
            "compile",
        ),
        ({"optimizer": 17.0}, (), "a trace shows", None),
    ],
)
def test_slow_kernels_by_family(families: dict[str, float], enabled: tuple[str, ...], says: str, patch: Any) -> None:
    seen = with_trace(gpt2_tuned(evidence={"fused": {"fused_groups": 1}}, **SLOW), 120.0, {}, families)
    (finding,) = findings(seen, enabled)
    assert finding.bottleneck == "compute_bound" and says in finding.why and "18 %" not in finding.why
    assert finding.patch == (None if patch is None else {"rungs": {patch: {"enabled": True}}})


def test_attention_written_by_hand_is_named() -> None:
    kernels = {"gemm": 60.0, "elementwise": 40.0}
    by_hand = with_trace(gpt2_tuned(**SLOW), 120.0, {}, kernels, attention_by_hand_ms=45.6)
    (finding,) = findings(by_hand)
    assert finding.title == "BUSY, NOT FAST: ATTENTION" and finding.bottleneck == "compute_bound"
    assert "hand-written attention takes at least 38 % of the kernels' time" in finding.why
    assert "scaled_dot_product_attention" in finding.why
    little = with_trace(gpt2_tuned(**SLOW), 120.0, {}, kernels, attention_by_hand_ms=17.9)
    assert findings(little)[0].title == "BUSY, NOT FAST: ELEMENTWISE", "the control: 14.9 %"
    updates = with_trace(gpt2_tuned(**SLOW), 120.0, {}, {"optimizer": 50.0}, attention_by_hand_ms=45.6)
    assert "the optimizer takes 42 %" in findings(updates)[0].why
    moving = with_trace(resnet50_resident(), 37.0, {}, kernels, attention_by_hand_ms=14.0)
    assert "hand-written attention at least 38 %" in findings(moving)[0].why


MISALIGNED = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(cutlass_75_tensorop_b"


@pytest.mark.parametrize(
    ("name", "ms", "named"),
    [
        (MISALIGNED, 50.0, True),
        (MISALIGNED, 17.0, False),
        (MISALIGNED.replace("align1", "align8"), 50.0, False),
        ("cutlass_80_simt_sgemm_256x128_8x4_tn_align1", 50.0, False),
        ("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT", 50.0, False),
    ],
    ids=["align1", "little", "align8", "fp32", "aligned"],
)
def test_misaligned_matmuls_are_named_by_their_kernels(name: str, ms: float, named: bool) -> None:
    """GPT-2's output layer has 50,257 columns; on an H200 its three products took 123 of 302 ms."""
    top = [{"name": name, "ms": ms}, {"name": "vectorized_elementwise", "ms": 20.0}]
    seen = with_trace(gpt2_tuned(**SLOW), 120.0, {}, {"gemm": 70.0, "elementwise": 30.0}, top=top)
    (finding,) = findings(seen)
    assert (finding.title == "BUSY, NOT FAST: MISALIGNED MATMULS") is named and finding.bottleneck == "compute_bound"
    says = "misaligned matmuls take at least 42 % of the kernels' time; compiling pads such matmuls"
    assert (says in finding.why) is named
    by_hand = with_trace(gpt2_tuned(**SLOW), 120.0, {}, {"gemm": 110.0}, top=top, attention_by_hand_ms=60.0)
    assert findings(by_hand)[0].title == "BUSY, NOT FAST: ATTENTION", "what takes longer comes first"


@pytest.mark.parametrize(("part", "kernel"), [(0.31, None), (0.1, None), (0.31, "triton_poi_fused_0")])
def test_misaligned_matmuls_are_named_before_a_trace(part: float, kernel: str | None) -> None:
    flops = {"per_sample": 100.0, "misaligned": 100.0 * part, "misaligned_size": 50_257}
    seen = gpt2_tuned(**{**SLOW, "flops": flops})
    if kernel is not None:
        seen = with_trace(seen, 120.0, {}, {}, top=[{"name": kernel, "ms": 1.0}])
    (finding,) = findings(seen)
    says = "31 % of its FLOPs are in misaligned matmuls (50,257 is not a multiple of 8); a trace"
    assert (says in finding.why) is (part > 0.15 and kernel is None)


def test_what_helps_with_misaligned_matmuls_depends_on_what_is_compiled() -> None:
    def advise(enabled: tuple[str, ...] = (), kernel: str = "elementwise", classes: int | None = None) -> Finding:
        top = [{"name": MISALIGNED, "ms": 50.0}, {"name": kernel, "ms": 20.0}]
        given = gpt2_tuned(evidence={"model": {"classes": classes}}, **SLOW)
        (finding,) = findings(with_trace(given, 120.0, {}, {"gemm": 70.0}, top=top), enabled)
        return finding

    assert advise().patch == advise(classes=50_257).patch == {"rungs": {"compile": {"enabled": True}}}
    assert advise(("compile",), "triton_poi_fused_0", 50_257).patch == {"rungs": {"loss": {"enabled": True}}}
    for finding in (
        advise(("compile",), "triton_poi_fused_0"),
        advise(("compile", "loss"), "triton_poi_fused_0", 50_257),
    ):
        assert finding.patch is None and "no further rung helps with this: pad that dimension" in finding.why


def test_kernels_of_inductor_show_that_it_is_compiled() -> None:
    loose = {"elementwise": 60.0}
    seen = with_trace(gpt2_tuned(**SLOW), 120.0, {}, loose, top=[{"name": "triton_poi_fused_add_0", "ms": 3.0}])
    assert findings(seen)[0].patch is None
    eager = with_trace(gpt2_tuned(**SLOW), 120.0, {}, loose, top=[{"name": "vectorized_elementwise", "ms": 3.0}])
    assert findings(eager)[0].patch == {"rungs": {"compile": {"enabled": True}}}


@pytest.mark.parametrize(
    ("change", "says", "patch"),
    [
        (
            {"precision": "32-true", "peaks": {"dtype": "tf32"}},
            "its matrix products run in tf32",
            {"amp": {"enabled": True}},
        ),
        (
            {"gpu": {"gr_active_pct": 99.0, "sm_active_pct": 49.0}, "micro_batch": 8, "global_batch": 32},
            "only 49 % of its SMs have work",
            {"batch": {"enabled": True, "micro_batch": 32}},
        ),
        (
            {"gpu": {"gr_active_pct": 99.0, "sm_active_pct": 51.0}, "micro_batch": 8, "global_batch": 32},
            "a trace shows",
            None,
        ),
        ({"gpu": {"gr_active_pct": 99.0, "sm_active_pct": 49.0}}, "only 49 % of its SMs have work", None),
        # A kernel that multiplies nothing: no advice about arithmetic.
        (
            {
                "precision": "32-true",
                "peaks": {"dtype": "fp32"},
                "mfu": {"datasheet": 1e-9, "dtype_in_use": 1e-8},
                "gpu": {"gr_active_pct": 99.0, "sm_active_pct": 1.0},
            },
            "only 1 % of its SMs have work",
            None,
        ),
    ],
)
def test_slow_for_a_reason_that_needs_no_trace(change: dict[str, Any], says: str, patch: Any) -> None:
    (finding,) = findings(gpt2_tuned(**{**SLOW, **change}))
    assert finding.bottleneck == "compute_bound" and says in finding.why
    assert finding.patch == (None if patch is None else {"rungs": patch})


def test_a_mix_of_fp32_and_tf32_goes_by_where_the_work_is() -> None:
    mix = {"peaks": {"dtype": "fp32 + tf32", "convolution_tf32": True}, "precision": "32-true"}
    assert findings(gpt2_naive(**mix, flops={"matmul": 9.0, "convolution": 1.0}))[0].bottleneck == "fp32_math"
    assert findings(gpt2_naive(**mix, flops={"matmul": 1.0, "convolution": 9.0}))[0].bottleneck == "compute_bound"


def test_where_nothing_was_measured_nothing_is_claimed() -> None:
    (finding,) = findings(scene(20.0, trail=18.0))
    assert finding.bottleneck == "none" and "how well the GPU is used was not measured" in finding.why
    assert "fastloop diagnose --trace 5" in finding.why
    counted = dataclasses.replace(gpt2_naive(), flops={"at_least": True})
    assert "at least 36 TFLOP/s" in findings(counted)[0].why


def test_a_busy_gpu_whose_work_was_not_counted_is_named_by_its_counters() -> None:
    """Seen: gpt2 under every rung, compiled, at 41 % of what the GPU gives, was no bottleneck at all."""
    counters = {"gr_active_pct": 99.0, "tensor_active_pct": 41.0, "dram_active_pct": 40.0}
    seen = gpt2_tuned(mfu={}, tflop_per_s=None, gpu=counters)
    (finding,) = findings(seen)
    assert finding.bottleneck == "compute_bound" and finding.title == "BUSY, NOT FAST"
    assert "tensor cores 41 % active, DRAM 40 % active" in finding.why and "fastloop diagnose --trace 5" in finding.why
    by_kernel = with_trace(seen, 120.0, {}, {"gemm": 50.0, "attention": 45.6})
    (finding,) = findings(by_kernel)
    assert finding.title == "BUSY, NOT FAST: ATTENTION" and "attention takes 38 %" in finding.why
    # A control: the same counters of a GPU that is well used.
    assert findings(gpt2_tuned(mfu={}, gpu={**counters, "tensor_active_pct": 60.0}))[0].title.endswith("WELL USED")


# -- a GPU that works for most of the step, and idles for the rest ----------------------------------------------------

LINES = tuple(
    {"where": where, "what": what, "per_step": 1.0, "ms_per_step": None, "instead": "log it detached"}
    for where, what in (("bert.py:31", ".item()"), ("bert.py:34", "boolean mask"), ("bert.py:40", "copy to the device"))
)


def bert(**changes: Any) -> Any:
    """Seen: fp32 at 3.4 % of the bf16 peak, at work for 69 % of the step, three lines that synchronise; no finding."""
    usual: dict[str, Any] = {
        "step": 180.0,
        "trail": 60.0,
        "lead_ms": 2.0,
        "samples_per_s": 355.0,
        "tflop_per_s": 33.6,
        "gpu": {"nvml_busy_pct": 84.0, "gr_active_pct": 69.0, "tensor_active_pct": 0.0, "dram_active_pct": 18.0},
        "mfu": {"datasheet": 0.034, "dtype_in_use": 0.5},
        "flops": {"matmul": 9e10},
        "syncs": LINES,
    }
    return scene(**{**usual, **changes})


def shares(seen: Any) -> dict[str, float]:
    return {finding.bottleneck: round(finding.share_pct or 0.0, 1) for finding in findings(seen)}


def test_every_share_of_a_half_idle_step_has_a_name() -> None:
    first, second = findings(bert())
    assert (first.bottleneck, first.share_pct) == ("fp32_math", pytest.approx(69))
    assert first.title == "BUSY, NOT FAST: FP32 MATH" and first.patch == {"rungs": {"amp": {"enabled": True}}}
    assert (second.bottleneck, second.share_pct) == ("sync", pytest.approx(31))
    assert second.detail[0].startswith("bert.py:31 .item()") and len(second.detail) == 3
    assert "idle for 55.8 of 180.0 ms a step after the host had waited for it" in second.why


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trail": 0.0}, {"fp32_math": 69.0, "sync": 31.0}),
        ({"gpu": {"nvml_busy_pct": 69.0}}, {"fp32_math": 69.0, "sync": 31.0}),
        ({"syncs": tuple({**line, "ms_per_step": 6.0} for line in LINES)}, {"fp32_math": 69.0, "sync": 10.0}),
        ({"gpu": {"gr_active_pct": 93.0, "tensor_active_pct": 0.0}}, {"fp32_math": 93.0, "sync": 7.0}),
        # Controls: no line is listed; the work is well done; the idle time has an owner that hides quicker kernels.
        ({"syncs": ()}, {"fp32_math": 69.0}),
        ({"mfu": {"datasheet": 0.3}, "precision": "bf16-mixed", "peaks": BF16}, {"sync": 31.0}),
        ({"trail": 0.0, "syncs": ()}, {"launch_bound": 31.0}),
        ({"syncs": (), "data_wait": 55.8, "loader": WORKERS}, {"data_wait": 31.0}),
        ({"gpu": {"gr_active_pct": 45.0}}, {"sync": 45.0}),
        # What this process does by itself comes in turn with the GPU's work, unless it launches without pause.
        ({"syncs": (), "data_wait": 55.8}, {"fp32_math": 69.0, "data_wait": 31.0}),
        ({"syncs": (), "callbacks_logging": 55.8}, {"fp32_math": 69.0, "callbacks_logging": 31.0}),
        ({"syncs": (), "callbacks_logging": 30.0, "trail": 0.0}, {"callbacks_logging": 16.7, "launch_bound": 14.3}),
    ],
    ids=[
        "drained",
        "NVML",
        "timed",
        "hardly idle",
        "no lines",
        "well used",
        "launches",
        "data of workers",
        "mostly idle",
        "data",
        "callbacks",
        "callbacks, drained",
    ],
)
def test_who_owns_the_rest_of_the_step(change: dict[str, Any], expected: dict[str, float]) -> None:
    assert shares(bert(**change)) == expected


def test_idle_time_without_a_known_reason_is_said_beside_it() -> None:
    first = findings(bert(syncs=()))[0]
    assert "the GPU was idle for another 55.8 of 180.0 ms a step" in first.detail[0]
    assert "fastloop diagnose --syncs --trace 5" in first.detail[0]
    assert "idle" not in " ".join(findings(bert())[0].detail)


def test_slow_kernels_beside_idle_time_are_named_by_their_family() -> None:
    loose = bert(precision="bf16-mixed", peaks=BF16, mfu={"datasheet": 0.1})
    traced = with_trace(loose, 124.0, {"sync": 56.0}, {"elementwise": 62.0, "gemm": 40.0})
    assert shares(traced) == {"compute_bound": 68.9, "sync": 31.1}
    assert findings(traced)[0].title == "BUSY, NOT FAST: ELEMENTWISE"
    assert "the GPU is busy for 124.0 of 180.0 ms" in findings(traced)[0].why


@pytest.mark.parametrize(
    ("optimizer_ms", "found", "enabled", "patch", "says"),
    [
        (
            16.0,
            {"own": [], "fusing_saves_ms": 10.0},
            (),
            {"rungs": {"fused": {"enabled": True}}},
            "the optimizer takes 16.0 of 40.0 ms a step, and its fused form would save about 10.0 ms of it",
        ),
        (
            16.0,
            {"own": [], "fusing_saves_ms": 20.0},
            (),
            {"rungs": {"fused": {"enabled": True}}},
            "the optimizer takes 16.0 of 40.0 ms a step, and its fused form would save most of it",
        ),
        (16.0, {"own": [], "fusing_saves_ms": 10.0}, ("fused",), None, "create yours with fused=True"),
        (
            16.0,
            {"own": ["Lion"], "fusing_saves_ms": 0.0},
            (),
            None,
            "Lion, not one of torch's optimizers, takes 16.0 of",
        ),
        (
            16.0,
            {"own": [], "no_fused_form": ["LBFGS"], "evaluations_per_step": 4.0, "fusing_saves_ms": 0.0},
            (),
            None,
            "LBFGS takes 16.0 of 40.0 ms a step on top of training_step and its backward, which it runs 4.0 times a"
            " step;"
            " no rung helps with this: use a smaller max_iter or history_size",
        ),
        (
            16.0,
            {"own": [], "no_fused_form": ["RMSprop", "RMSprop"], "fusing_saves_ms": 0.0},
            (),
            None,
            "RMSprop, without a fused form, takes 16.0 of 40.0 ms a step; no rung helps with this: choose an",
        ),
        (
            16.0,
            {"own": [], "no_fused_form": ["RMSprop", "Adadelta"], "fusing_saves_ms": 0.0, "others": 1},
            (),
            None,
            "the optimizers, among them RMSprop and Adadelta (without a fused form), take 16.0 of 40.0 ms a step;",
        ),
        (
            16.0,
            {"own": [], "no_fused_form": ["SparseAdam"], "fusing_saves_ms": 0.0, "takes_sparse_gradients": True},
            (),
            None,
            "no rung helps with this: fused optimizers need dense gradients; for small tables, try AdamW with"
            " sparse=False (which changes the training)",
        ),
        (3.0, {"own": ["Lion"], "fusing_saves_ms": 0.0}, (), None, None),
        (16.0, {"own": [], "fusing_saves_ms": 3.0}, (), None, None),
        (16.0, {}, (), None, None),
    ],
    ids=[
        "slow",
        "slower than its copies",
        "fused all the same",
        "own",
        "evaluates several times",
        "no fused form",
        "one of several",
        "sparse gradients",
        "own and quick",
        "little to save",
        "not measured",
    ],
)
def test_a_slow_optimizer_on_the_cpu(
    optimizer_ms: float, found: Any, enabled: tuple[str, ...], patch: Any, says: str | None
) -> None:
    seen = on_cpu(optimizer=optimizer_ms, forward=8.0, backward=14.0, evidence={"optimizer": found})
    first, *_ = findings(seen, enabled)
    assert (first.title == "BUSY, NOT FAST: OPTIMIZER") is (says is not None)
    if says is not None:
        assert first.share_pct == pytest.approx(40) and first.patch == patch and says in first.why
        assert first.ceiling_gain_pct == pytest.approx(100 / 3 if found["fusing_saves_ms"] == 10.0 else 200 / 3)


@pytest.mark.parametrize(("real", "share"), [(400.0, 55.5), (920.0, None), (1000.0, None), (None, None)])
def test_tokens_that_are_padding(real: float | None, share: float | None) -> None:
    seen = on_cpu(forward=15.0, backward=22.0, optimizer=1.0, tokens_per_s=1000.0, unpadded_tokens_per_s=real)
    (finding,) = findings(seen)
    assert (finding.title == "BUSY, NOT FAST: PADDING") is (share is not None) and finding.patch is None
    assert finding.share_pct == (None if share is None else pytest.approx(share))
    if share is not None:
        assert "60 % of the tokens are padding, which costs about 22.2 of 40.0 ms a step" in finding.why


def test_beside_what_owns_the_time_of_a_gpu_padding_has_no_share() -> None:
    plain = findings(gpt2_naive())
    *others, last = findings(gpt2_naive(tokens_per_s=1000.0, unpadded_tokens_per_s=400.0))
    assert others == [*plain] and last.title == "BUSY, NOT FAST: PADDING" and last.share_pct is None
    assert last.bottleneck == "compute_bound"  # others read the names: no new ones


def test_attention_by_hand_is_named_without_a_trace() -> None:
    def slow(**model: Any) -> Any:
        gpu = {"gr_active_pct": 97.0, "tensor_active_pct": 20.0, "dram_active_pct": 40.0, "sm_active_pct": 90.0}
        usual = {"step": 100.0, "trail": 20.0, "lead_ms": 20.0, "precision": "bf16-mixed", "peaks": BF16}
        return scene(**usual, gpu=gpu, mfu={"datasheet": 0.15, "dtype_in_use": 0.15}, evidence={"model": model})

    (finding,) = findings(slow(attends_by_hand=2))
    assert finding.title == "BUSY, NOT FAST: ATTENTION" and finding.patch == {"rungs": {"attention": {"enabled": True}}}
    assert "the model's attention is hand-written" in finding.why and finding.ceiling_gain_pct is None
    for took, title in ((True, "BUSY, NOT FAST"), (False, "BUSY, NOT FAST: ATTENTION")):
        verdict = Verdict(rung="attention", took=took, why="it is said so")
        (finding,) = findings(slow(attends_by_hand=2), ("attention",), (verdict,))
        assert finding.title == title, "what is written by hand need not run so"
    (finding,) = findings(slow(attends_by_hand=0))
    assert finding.title == "BUSY, NOT FAST" and finding.patch is None
    (finding,) = findings(with_trace(slow(attends_by_hand=2), 97.0, {"other": 3.0}, {"gemm": 90.0}))
    assert finding.title == "BUSY, NOT FAST", "a trace has shown that it takes little"


def test_nothing_waits_for_data_only_where_nothing_does() -> None:
    assert "nothing waits for data" in findings(gpt2_naive())[0].why
    assert "nothing waits" not in findings(gpt2_naive(data_wait=150.0))[0].why


@pytest.mark.parametrize(
    ("multiprocessors", "title"), [(90.0, "BUSY, NOT FAST"), (2.0, "BUSY, NOT FAST: SMALL KERNELS")]
)
@pytest.mark.parametrize(("waits", "first"), [(20.0, "data_wait"), (0.0, "compute_bound")])
def test_what_helps_comes_before_work_that_no_rung_helps(
    waits: float, first: str, multiprocessors: float, title: str
) -> None:
    """A GPU at work for two thirds of a step whose batches this process makes in turn."""
    gpu = {"gr_active_pct": 100 * 40 / (40 + waits), "tensor_active_pct": 5.0, "sm_active_pct": multiprocessors}
    usual = {"step": 40.0 + waits, "trail": 20.0, "precision": "bf16-mixed", "peaks": BF16}
    found = findings(scene(**usual, data_wait=waits, gpu=gpu, mfu={"datasheet": 0.05}, loader=NO_WORKERS))
    assert found[0].bottleneck == first and (
        len(found) == 1 or found[0].patch == {"rungs": {"workers": {"enabled": True}}}
    )
    assert found[-1].title == title and (found[-1].share_pct or 0) > 60


def test_advice_stands_before_a_small_finding_with_a_patch() -> None:
    """More than half of the tokens are padding, and workers would save a sixteenth of the step."""
    words = {"tokens_per_s": 1000.0, "unpadded_tokens_per_s": 400.0}
    found = findings(on_cpu(forward=15.0, backward=20.0, optimizer=1.0, data_wait=2.5, loader=NO_WORKERS, **words))
    assert [each.title for each in found] == ["BUSY, NOT FAST: PADDING", "STARVED BY DATA"]
    assert found[1].patch == {"rungs": {"workers": {"enabled": True}}}
