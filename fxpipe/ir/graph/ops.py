"""What the compiler knows of an op by the bare name of what it calls, where more than one room asks: views, casts,
families. `graph.called` gives the name; `graph.op_name` without the mark of an op in place, as these tables have it."""

from __future__ import annotations


def _names(text: str, *families: frozenset[str]) -> frozenset[str]:
    return frozenset(text.split()).union(*families)


# Views ----------------------------------------------------------------------------------------------------------------

# Another shape of the same elements, in the same order; memory that does not lie so is copied.
RESHAPES = _names("view view_as reshape reshape_as ravel flatten unflatten squeeze unsqueeze")
PERMUTATIONS = _names("transpose swapaxes swapdims permute t")
PIECES = _names("unbind chunk split split_with_sizes tensor_split")  # a tuple of them
# What gives its argument back if that is as asked for, and else a copy.
CASTS = _names("""
    as_subclass as_tensor asarray contiguous resolve_conj resolve_neg to type type_as cpu cuda
    double float half bfloat16 long int short char byte bool cfloat cdouble chalf
""")
# The memory of the first argument, and no values of it are kept for backward.
_OTHER_VIEWS = """
    T mT H mH real imag data alias adjoint as_strided broadcast_to conj detach diagonal dsplit expand expand_as getattr
    getitem hsplit linalg_diagonal matrix_H moveaxis movedim narrow numpy_T positive select slice slice_inverse unfold
    view_as_complex view_as_real vsplit __getitem__ __get__
"""
VIEWS = _names(_OTHER_VIEWS, RESHAPES, PERMUTATIONS, PIECES)

# Families -------------------------------------------------------------------------------------------------------------

ADD = _names("add sub iadd isub rsub subtract")
MULTIPLY = _names("mul imul multiply")
DIVIDE = _names("div truediv itruediv true_divide divide")
ARITHMETIC = _names("pow ipow rpow floordiv ifloordiv rfloordiv floor_divide rtruediv", ADD, MULTIPLY, DIVIDE)
CHANNEL_DROPOUTS = _names("dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout")  # drop them whole
DROPOUTS = _names("dropout alpha_dropout", CHANNEL_DROPOUTS)
# What is done to each number by itself.
_ELEMENTWISE = """
    abs alpha_dropout ceil celu clamp clip clone contiguous cos detach double dropout elu eq erf exp expm1 float floor
    ge gelu gt half hardsigmoid hardswish hardtanh invert le leaky_relu log log1p log2 logical_and logical_not
    logical_or logsigmoid lt masked_fill maximum minimum mish nan_to_num ne neg pow reciprocal relu relu6 round rsqrt
    selu sigmoid sign silu sin softplus softsign sqrt square tan tanh threshold to type_as where
"""
POINTWISE = _names(_ELEMENTWISE, ADD, MULTIPLY, DIVIDE)
# What reads a tensor for its sizes only.
LIKE = _names("""
    empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like rand_like randint_like
    randn_like zeros_like
""")
CONCATENATIONS = _names("cat concat concatenate")
JOINS = _names("stack hstack vstack", CONCATENATIONS)
MATMULS = _names("linear matmul mm bmm mv dot vdot inner __matmul__")
RECURRENT = _names("lstm gru rnn_tanh rnn_relu")
CELLS = frozenset(f"{name}_cell" for name in RECURRENT)
LABEL_LOSSES = _names("cross_entropy nll_loss")
LOSSES = _names("mse_loss l1_loss smooth_l1_loss huber_loss kl_div", LABEL_LOSSES)
