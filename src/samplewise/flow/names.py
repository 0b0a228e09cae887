"""Families of ops, by the one name that `torch.add`, `Tensor.add_` and `+` have."""

ADDING = {"add", "radd", "iadd", "sub", "rsub", "isub"}
"""Ops after which a sum of samples is one of more terms."""

LINEAR = set(
    "add radd iadd sub rsub isub neg pos clone contiguous to float double half bfloat16 type detach cuda cpu "
    "requires_grad alias data real imag view_as_real to_dense to_sparse to_sparse_coo to_sparse_csr to_sparse_csc coalesce".split()
)
"""Elementwise ops that keep a weighted sum a weighted sum."""

DIVIDING = set("div truediv itruediv true_divide divide".split())
SCALING = DIVIDING | set("mul rmul imul multiply".split())

ELEMENTWISE = (
    LINEAR
    | SCALING
    | set(
        "abs absolute acos acosh addcdiv addcmul alpha_dropout and angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh "
        "asin asinh atan atan2 atanh bernoulli bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift "
        "bitwise_xor bool byte ceil celu char clamp clamp_max clamp_min clip complex conj conj_physical copy copysign cos cosh "
        "deg2rad digamma dropout elu empty_like eq erf erfc erfinv exp exp2 expm1 feature_alpha_dropout feature_dropout fill "
        "float_power floor floor_divide floordiv fmax fmin fmod frac full_like gcd ge gelu greater greater_equal gt hardshrink "
        "hardsigmoid hardswish hardtanh heaviside hypot iand idiv ifloordiv ilshift imod int invert ior ipow irshift "
        "isclose isfinite isinf isnan isneginf isposinf isreal ixor ldexp le leaky_relu lerp less less_equal lgamma log log10 "
        "log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid long lt "
        "masked_fill maximum minimum mish mod nan_to_num native_dropout ne negative nextafter not not_equal ones_like or "
        "polar positive pow rad2deg rand_like randn_like rdiv reciprocal relu relu6 remainder resolve_conj resolve_neg "
        "rfloordiv rmod round rpow rrelu rrelu_with_noise rsqrt rtruediv selu sgn short sigmoid sign signbit silu sin sinc sinh "
        "softplus softshrink sqrt square subtract tan tanh tanhshrink threshold tril triu trunc type_as where "
        "xlogy xor zero zeros_like exponential geometric cauchy log_normal random normal uniform randint_like".split()
    )
)
"""Ops that handle each element alone, or those that broadcasting lines up."""

RESHAPED = set(
    "view view_as reshape flatten unflatten ravel reshape_as unsafe_view squeeze unsqueeze atleast_1d atleast_2d atleast_3d".split()
)

PERMUTED = set("permute transpose swapaxes swapdims movedim moveaxis t T mT H mH adjoint".split())

INDEXED_ALONG = set(
    "select narrow chunk split split_with_sizes tensor_split hsplit vsplit dsplit unbind index_select flip roll "
    "repeat_interleave unfold".split()
)

REDUCTIONS = set(
    "sum mean prod amax amin max min argmax argmin any all logsumexp norm linalg_norm linalg_vector_norm var std var_mean "
    "std_mean median nanmean nansum nanmedian count_nonzero mode kthvalue aminmax".split()
)

ALONG_DIM = set("softmax log_softmax cumsum cumprod cummax cummin logcumsumexp topk glu multinomial".split())

POOLS = set(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices "
    "max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d upsample_nearest1d upsample_nearest2d "
    "upsample_nearest3d upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d upsample_bicubic2d_aa".split()
)

IMAGES = set(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d batch_norm group_norm instance_norm "
    "pixel_shuffle pixel_unshuffle channel_shuffle grid_sampler affine_grid_generator im2col col2im".split()
)

FOURIER = {f"fft_{kind}{rank}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for rank in ("", "2", "n")}

LOSSES = set(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss poisson_nll_loss triplet_margin_loss cosine_embedding_loss margin_ranking_loss hinge_embedding_loss "
    "multi_margin_loss multilabel_margin_loss pairwise_distance".split()
)
CLASS_LOSSES = set("cross_entropy cross_entropy_loss nll_loss nll_loss_nd".split())
