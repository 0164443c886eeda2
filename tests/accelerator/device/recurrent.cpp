// The cells of LSTM and GRU. torch computes them op by op on the CPU, and by one kernel on CUDA and on backends such as
// this, which must have it. Here that kernel is made of other operators of the device.
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/tanh_backward.h>
#include <torch/library.h>

#include "device.h"

namespace simulated {

using at::Tensor;
using Maybe = const std::optional<Tensor>&;

static Tensor with_bias(const Tensor& gates, Maybe bias) { return bias && bias->defined() ? gates + *bias : gates; }

static Tensor bias_gradient(const Tensor& gates, bool has_bias) { return has_bias ? gates.sum(0) : Tensor(); }

// The last result is for backward: the gates, as the next function takes them.
static std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, const Tensor& hidden, const Tensor& cx, Maybe input_bias, Maybe hidden_bias) {
  auto gates = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

static std::tuple<Tensor, Tensor, Tensor> lstm_backward(Maybe grad_hy, Maybe grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& gates, bool has_bias) {
  auto parts = gates.chunk(4, 1);
  auto &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  auto tanh = cy.tanh();
  auto dh = grad_hy && grad_hy->defined() ? *grad_hy : cy * 0;
  auto dc = with_bias(at::tanh_backward(dh * out, tanh), grad_cy);
  auto all = at::cat({at::sigmoid_backward(dc * cell, in), at::sigmoid_backward(dc * cx, forget),
                      at::tanh_backward(dc * in, cell), at::sigmoid_backward(dh * tanh, out)}, 1);
  return {all, dc * forget, bias_gradient(all, has_bias)};
}

static std::tuple<Tensor, Tensor> gru(const Tensor& input, const Tensor& hidden, const Tensor& hx, Maybe input_bias, Maybe hidden_bias) {
  auto x = with_bias(input, input_bias).chunk(3, 1), h = with_bias(hidden, hidden_bias).chunk(3, 1);
  auto reset = (x[0] + h[0]).sigmoid(), keep = (x[1] + h[1]).sigmoid();
  auto made = (x[2] + reset * h[2]).tanh();
  return {made + keep * (hx - made), at::cat({reset, keep, made, hx, h[2]}, 1)};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& dh, const Tensor& gates, bool has_bias) {
  auto parts = gates.chunk(5, 1);
  auto &reset = parts[0], &keep = parts[1], &made = parts[2], &hx = parts[3], &hidden = parts[4];
  auto dmade = at::tanh_backward(dh - dh * keep, made);
  auto dreset = at::sigmoid_backward(dmade * hidden, reset), dkeep = at::sigmoid_backward(dh * (hx - made), keep);
  auto dx = at::cat({dreset, dkeep, dmade}, 1), dhidden = at::cat({dreset, dkeep, dmade * reset}, 1);
  return {dx, dhidden, dh * keep, bias_gradient(dx, has_bias), bias_gradient(dhidden, has_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_backward);
  m.impl("_thnn_fused_gru_cell", &gru);
  m.impl("_thnn_fused_gru_cell_backward", &gru_backward);
}

}  // namespace simulated
