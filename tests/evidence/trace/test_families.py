"""Names as cuBLAS, cuDNN, ATen, NCCL and Inductor write them, and the family each belongs to."""

from __future__ import annotations

import pytest

from fastloop.evidence.trace.families import classify_kernel, classify_operator
from fastloop.records.measurement import FAMILIES

KERNELS = {
    "gemm": (
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
        "ampere_sgemm_128x64_tn",
        "void gemv2T_kernel_val<int, float>",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_execute_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4>(cutlass_80::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
        "void dot_kernel<float, 128, 0>",
        "triton_tem_fused_addmm_relu_3",
        "triton_mm_12",
        "Cijk_Ailk_Bljk_SB_MT64x64x16",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64",
        "triton_tem_fused_flex_attention_backward_2",
    ),
    "convolution": (
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_execute_kernel__5x_cudnn",
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<float>",
        "cudnn::winograd_nonfused::winogradForwardData4x4",
        "void cudnn::ops::nchwToNhwcKernel<float, float>",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_bf16>",
        "triton_tem_fused_convolution_4",
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float> > >",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>",
        "void cudnn::ops::softmax_fw_kernel<float>",
        "void cudnn::ops::pooling_fw_4d_kernel<float>",
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, int>",
        "triton_poi_fused_gelu_7",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>",
        "my_kernel_convertTensor_fill",
        "triton_poi_fused_convolution_relu_0",
        "triton_poi_fused_addmm_relu_2",
        "triton_red_fused__softmax_3",
        "void cub::DeviceReduceSingleTileKernel<float>",
        "triton_poi_fused__to_copy_add_1",
    ),
    "normalisation": (
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>",
        "void cudnn::batchnorm_bwtr_nhwc_semiPersist<__half>",
        "triton_per_fused_native_layer_norm_12",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>",
        "void at::native::batch_norm_collect_statistics_channels_last_kernel<float>",
        "triton_red_fused__native_batch_norm_legit_functional_5",
        "triton_red_fused_rms_norm_mul_1",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >",
        "void multi_tensor_apply_kernel<TensorListMetadata<2>, AdamFunctor<float> >",
        "triton_for_fused_3",
        "void at::native::amp_non_finite_check_and_unscale_cuda_kernel",
        "rmsprop_update_kernel",
        "fused_adam_kernel",
    ),
    "copy": (
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
        "triton_poi_fused__to_copy_3",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<float, unsigned int, 2, 64, 64>",
    ),
    "nccl": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_ReduceScatter_RING_LL_Sum_bfloat16",
        "void c10d::symmetric_memory::multimem_all_reduce_kernel",
    ),
    "other": ("my_cuda_kernel", "spin_kernel"),
}

OPERATORS = {
    "gemm": ("aten::addmm", "aten::mm", "aten::bmm", "aten::matmul", "aten::linear", "mkldnn::_linear_pointwise"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::scaled_dot_product_attention"),
    "convolution": ("aten::mkldnn_convolution", "aten::convolution_backward", "aten::_slow_conv2d_forward"),
    "normalisation": ("aten::native_batch_norm", "aten::native_layer_norm_backward", "aten::_fused_rms_norm"),
    "elementwise": ("aten::add_", "aten::relu", "aten::sum", "aten::_softmax", "aten::mul", "aten::addcmul_"),
    "optimizer": ("aten::_fused_adamw_", "aten::_foreach_add_"),
    "copy": ("aten::copy_", "aten::clone", "aten::cat"),
    "nccl": ("c10d::allreduce_", "gloo:all_reduce"),
    "other": (
        "aten::view",
        "aten::as_strided",
        "aten::empty",
        "AddmmBackward0",
        "aten::t",
        "autograd::engine::evaluate_function: AddmmBackward0",
    ),
}


def test_every_family_is_tried() -> None:
    assert set(KERNELS) == set(OPERATORS) == set(FAMILIES)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in KERNELS.items() for name in names])
def test_kernels(family: str, name: str) -> None:
    assert classify_kernel(name) == family


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in OPERATORS.items() for name in names])
def test_operators(family: str, name: str) -> None:
    assert classify_operator(name) == family
