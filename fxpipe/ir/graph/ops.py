"""What the compiler knows of an op by the name of the function or method: whether it is a view, is elementwise, works
along a dimension, keeps something for backward. `graph.op_name` gives the name as in these tables: without the trailing
`_` of in-place ops.

Facts that need code are elsewhere: FLOPs in `profiling/flops.py`, sharding in `passes/sharding/rules/`.
"""

from __future__ import annotations


def _names(text: str, *families: frozenset[str]) -> frozenset[str]:
    return frozenset(text.split()).union(*families)


# Views ----------------------------------------------------------------------------------------------------------------

# Another shape of the same elements, in the same order; copied if the memory layout does not allow a view.
RESHAPES = _names("view view_as reshape reshape_as ravel flatten unflatten squeeze unsqueeze")
PERMUTATIONS = _names("transpose swapaxes swapdims permute t")
SPLIT_OPS = _names("unbind chunk split split_with_sizes tensor_split")  # a tuple of them
# These return their argument if it already has the requested type, device or layout, else a copy.
CASTS = _names("""
    as_subclass as_tensor asarray contiguous resolve_conj resolve_neg to type type_as cpu cuda
    double float half bfloat16 long int short char byte bool cfloat cdouble chalf
""")
# Views of the first argument; backward needs none of its values.
_OTHER_VIEWS = """
    T mT H mH real imag data alias adjoint as_strided broadcast_to conj detach diagonal dsplit expand expand_as getattr
    getitem hsplit linalg_diagonal matrix_H moveaxis movedim narrow numpy_T positive select slice slice_inverse unfold
    view_as_complex view_as_real vsplit __getitem__ __get__
"""
VIEWS = _names(_OTHER_VIEWS, RESHAPES, PERMUTATIONS, SPLIT_OPS)
MERE_VIEWS = VIEWS | CASTS

# Families -------------------------------------------------------------------------------------------------------------

ADD = _names("add sub iadd isub rsub subtract")
MULTIPLY = _names("mul imul multiply")
DIVIDE = _names("div truediv itruediv true_divide divide")
ARITHMETIC = _names("pow ipow rpow floordiv ifloordiv rfloordiv floor_divide rtruediv", ADD, MULTIPLY, DIVIDE)
CHANNEL_DROPOUTS = _names("dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout")  # drop whole channels
DROPOUTS = _names("dropout alpha_dropout", CHANNEL_DROPOUTS)
# Elementwise ops.
_ELEMENTWISE = """
    abs alpha_dropout ceil celu clamp clip clone contiguous cos detach double dropout elu eq erf exp expm1 float floor
    ge gelu gt half hardsigmoid hardswish hardtanh invert le leaky_relu log log1p log2 logical_and logical_not
    logical_or logsigmoid lt masked_fill maximum minimum mish nan_to_num ne neg pow reciprocal relu relu6 round rsqrt
    selu sigmoid sign silu sin softplus softsign sqrt square tan tanh threshold to type_as where
"""
POINTWISE = _names(_ELEMENTWISE, ADD, MULTIPLY, DIVIDE)
# Functions that make a tensor of numbers, with an optional `device`.
FACTORIES = _names("""
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye fft_fftfreq
    fft_rfftfreq full hamming_window hann_window kaiser_window linspace logspace ones rand randint randn randperm range
    scalar_tensor tensor tril_indices triu_indices zeros
""")
# Ops that use only the sizes of their tensor.
LIKE = _names("""
    empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like rand_like randint_like
    randn_like zeros_like
""")
ZEROS = _names("zeros zeros_like new_zeros")
SIZES = _names("size numel sym_size sym_size.int sym_numel")
CONCATENATIONS = _names("cat concat concatenate")
JOINS = _names("stack hstack vstack", CONCATENATIONS)
MATMULS = _names("linear matmul mm bmm mv dot vdot inner __matmul__")
RECURRENT = _names("lstm gru rnn_tanh rnn_relu")
CELLS = frozenset(f"{name}_cell" for name in RECURRENT)
MAX_POOLS = _names("max_pool1d max_pool2d fn")  # in torch.nn.functional, pools with optional indices are named `fn`

# Losses ---------------------------------------------------------------------------------------------------------------

LABEL_LOSSES = _names("cross_entropy nll_loss")
PAIR_LOSSES = _names("mse_loss l1_loss smooth_l1_loss huber_loss kl_div")  # of two tensors of one shape
LOSSES = LABEL_LOSSES | PAIR_LOSSES
# Losses in which samples do not meet: elementwise, or by rows.
_ELEMENTWISE_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss hinge_embedding_loss soft_margin_loss
    margin_ranking_loss gaussian_nll_loss
"""
ELEMENTWISE_LOSSES = _names(_ELEMENTWISE_LOSSES, PAIR_LOSSES)
ROW_LOSSES = _names("""
    cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss
""")
WEIGHTED_LOSSES = _names("mse_loss l1_loss huber_loss")  # divide by their weights, where they have any; others do not

# Dimensions -----------------------------------------------------------------------------------------------------------

# Ops that combine the elements along a dimension: the position and name of the argument that gives the dimension.
ALONG = {
    "softmax": (1, "dim"), "log_softmax": (1, "dim"), "softmin": (1, "dim"), "gumbel_softmax": (3, "dim"),
    "cumsum": (1, "dim"), "cumprod": (1, "dim"), "cummax": (1, "dim"), "cummin": (1, "dim"), "logcumsumexp": (1, "dim"),
    "sort": (1, "dim"), "argsort": (1, "dim"), "topk": (2, "dim"), "flip": (1, "dims"), "roll": (2, "dims"),
    "normalize": (2, "dim"), "diff": (2, "dim"), "glu": (1, "dim"), "rot90": (2, "dims"),
    "flipud": (1, "dims"), "fliplr": (1, "dims"), "msort": (1, "dim"), "gradient": (9, "dim"),
}  # fmt: skip
_TRANSFORMS = "fft ifft rfft irfft hfft ihfft fft2 ifft2 fftn ifftn"
ALONG |= {f"fft_{name}": (2, "dim") for name in sorted(_names(_TRANSFORMS))}
# Ops that mix what is in some dimensions of their first argument: all but the first one, or two; or the last ones.
_BEHIND_ONE = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d group_norm local_response_norm"
_BEHIND_ONE += " grid_sample fold pixel_shuffle pixel_unshuffle channel_shuffle"
BEHIND = dict.fromkeys(_names(_BEHIND_ONE), 1) | dict.fromkeys(_names("instance_norm interpolate upsample"), 2)
_MATRICES = """
    scaled_dot_product_attention triu tril fill_diagonal matrix_exp matrix_power inverse pinverse cholesky qr svd lu
    linalg_matrix_exp linalg_matrix_power linalg_inv linalg_pinv linalg_cholesky linalg_qr linalg_svd linalg_eig
    linalg_eigh linalg_lu linalg_solve linalg_lstsq
"""
WITHIN_LAST = (
    dict.fromkeys(_names(_MATRICES), 2)
    | {"stft": 1}
    | {
        f"{kind}_pool{dims}d": dims
        for kind in ("max", "avg", "lp", "adaptive_max", "adaptive_avg")
        for dims in (1, 2, 3)
    }
)
# Ops that treat each sample by itself unless they run over the batch dimension; and ops that always do.
_OVER_DIMS = _names("amax amin argmax cumsum flip log_softmax mean normalize roll select softmax stack sum")
OVER_DIMS = {name: ALONG.get(name, (1, "dim")) for name in sorted(_OVER_DIMS)}
_PER_SAMPLE = "conv_transpose1d conv_transpose2d group_norm instance_norm interpolate pad repeat rms_norm"
PER_SAMPLE = _names(_PER_SAMPLE, _OVER_DIMS)
# Ops that find their elements by index along a dimension: the position of the argument that gives the dimension.
LOOKUP = {
    "index_select": 1, "gather": 1, "take_along_dim": 2, "scatter": 1, "scatter_add": 1, "scatter_reduce": 1,
    "index_add": 1, "index_copy": 1, "index_fill": 1,
}  # fmt: skip
INDEXING = _names("""
    getitem index_select gather take_along_dim setitem scatter scatter_add scatter_reduce index_put index_add index_copy
    index_fill embedding
""")
# Linear ops in the first argument: applied before or after a sum over samples they give the same, if the other
# arguments are the same for all samples.
_LINEAR = """
    neg negative positive clone contiguous detach alias item requires_grad_ to type type_as float double half bfloat16
    cpu cuda sym_float expand expand_as broadcast_to movedim getitem select narrow index_select sum mean cumsum trace
    diagonal flip roll repeat tile tensor as_tensor scalar_tensor _add_batch_dim _remove_batch_dim
    each_sample stacked
"""
LINEAR = _names(_LINEAR, RESHAPES, PERMUTATIONS, SPLIT_OPS)

# What autograd keeps --------------------------------------------------------------------------------------------------

KEEP_NOTHING = _names("""
    add argmax cat clone contiguous copy cumsum float iadd isub mean neg pad roll stack sub sum to
""")
KEEP_RESULT = _names("elu exp log_softmax relu rsqrt sigmoid softmax sqrt tanh")
