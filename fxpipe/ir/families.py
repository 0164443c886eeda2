"""Families of ops, by the bare names of what they call: for who reads a model as operators, and who cuts those."""

# What is done to each number by itself.
POINTWISE = {
    "abs", "add", "alpha_dropout", "ceil", "celu", "clamp", "clip", "clone", "contiguous", "cos", "detach", "div",
    "double", "dropout", "dropout1d", "dropout2d", "dropout3d", "elu", "eq", "erf", "exp", "expm1",
    "feature_dropout", "float", "floor", "ge", "gelu", "gt", "half", "hardsigmoid", "hardswish", "hardtanh", "iadd",
    "imul", "invert", "isub", "itruediv", "le", "leaky_relu", "log", "log1p", "log2", "logical_and", "logical_not",
    "logical_or", "logsigmoid", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "nan_to_num", "ne", "neg",
    "pow", "reciprocal", "relu", "relu6", "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "silu", "sin",
    "softplus", "softsign", "sqrt", "square", "sub", "tan", "tanh", "threshold", "to", "truediv", "type_as",
    "where",
}  # fmt: skip
# What reads a tensor for its sizes only.
LIKE = {
    "empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like",
    "zeros_like",
}  # fmt: skip
PERMUTATIONS = {"transpose", "swapaxes", "swapdims", "permute", "t"}
VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "getitem", "narrow"}
PIECES = {"unbind", "chunk", "split", "split_with_sizes", "tensor_split"}
CELLS = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
LOSSES = {"cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"}
