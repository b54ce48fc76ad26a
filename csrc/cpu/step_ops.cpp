// The element-wise operations of a step, row by row, rounded where PyTorch rounds.
#include "step.h"

#include <string.h>

#include "kernels.h"

namespace vllm_cpu::VLLM_ISA {

namespace {

typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

template <int kType>
struct Elements {
  static constexpr int kBytes = dtype_bytes(kType);

  static uint8_t* at(const StepRows& rows, int64_t row, int64_t element) {
    return static_cast<uint8_t*>(rows.data) + (row * rows.stride + element) * kBytes;
  }
  // Whole registers are moved without a mask: masked stores are slow on some machines,
  // and what they wrote cannot be read again before it has left the core's queue.
  VLLM_INLINE F load_n(const uint8_t* p, int64_t i, int count) {
    if (count < kLanes) return load_as_float<kType>(p + i * kBytes, count);
    if constexpr (kType == kFloat32) {
      return load(reinterpret_cast<const float*>(p) + i);
    } else if constexpr (kType == kFloat16) {
      return load_f16(p + i * kBytes);
    } else {
      Halves half;
      memcpy(&half, p + i * kBytes, sizeof half);
      return as_float((U)(__builtin_convertvector(half, Words) << 16));
    }
  }
  VLLM_INLINE void store_n(uint8_t* p, int64_t i, F x, int count) {
    if (count < kLanes) return store_from_float<kType>(p + i * kBytes, x, count);
    if constexpr (kType == kFloat32) {
      store(reinterpret_cast<float*>(p) + i, x);
    } else if constexpr (kType == kFloat16) {
      store_f16(p + i * kBytes, x);
    } else {
      const Halves half = __builtin_convertvector(upper_half(x) >> 16, Halves);
      memcpy(p + i * kBytes, &half, sizeof half);
    }
  }
  VLLM_INLINE F rounded(F x) {
    if constexpr (kType == kFloat32) return x;
    if constexpr (kType == kFloat16) return round_f16(x);
    return as_float((U)upper_half(x));
  }
  // Bits of the nearest bf16, ties to even; NaN stays NaN.
  VLLM_INLINE Words upper_half(F x) {
    const Words bits = (Words)as_units(x);
    const Words near = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0xffff0000u) | 0x400000u : near;
  }
};

// body(i, count): kLanes elements from i on, fewer at the end.
template <class Body>
VLLM_INLINE void each(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, static_cast<int>(size - i));
}

template <int kType>
void embed(const StepOp& op, const StepInputs& in, int64_t row) {
  using E = Elements<kType>;
  const auto* const from = static_cast<const uint8_t*>(op.weight) +
                           in.token_ids[row] * op.weight_stride * E::kBytes;
  uint8_t* const out = E::at(op.out, row, 0);
  each(op.size, [&](int64_t i, int n) {
    E::store_n(out, i, mul(E::load_n(from, i, n), set1(op.scale)), n);
  });
}

template <int kType>
void norm_head(const StepOp& op, int64_t row, int64_t first) {
  using E = Elements<kType>;
  const uint8_t* x = E::at(op.x, row, first);
  F squares = set1(0.f);
  if (op.y.data != nullptr) {
    const uint8_t* const y = E::at(op.y, row, first);
    uint8_t* const sum = E::at(op.sum, row, first);
    each(op.size, [&](int64_t i, int n) {
      const F total = E::rounded(add(E::load_n(x, i, n), E::load_n(y, i, n)));
      E::store_n(sum, i, total, n);
      squares = fma(total, total, squares);
    });
    x = sum;
  } else {
    each(op.size, [&](int64_t i, int n) {
      const F value = E::load_n(x, i, n);
      squares = fma(value, value, squares);
    });
  }
  const float mean = reduce_add(squares) / static_cast<float>(op.size);
  const F factor = set1(1.f / __builtin_sqrtf(mean + op.eps));
  const auto* const weight = static_cast<const float*>(op.weight);
  uint8_t* const out = E::at(op.out, row, first);
  each(op.size, [&](int64_t i, int n) {
    F value = mul(E::load_n(x, i, n), factor);
    if (op.mode == kNormRounded) value = E::rounded(value);
    if (weight != nullptr) value = mul(value, load_f32(weight + i, n));
    E::store_n(out, i, value, n);
  });
}

// out[i] = a cos - b sin and out[i + half] = b cos + a sin, the first product rounded.
template <int kType>
VLLM_INLINE void rotated(F a, F b, F cos, F sin, F& low, F& high) {
  using E = Elements<kType>;
  low = fma(b, sub(set1(0.f), sin), E::rounded(mul(a, cos)));
  high = fma(a, sin, E::rounded(mul(b, cos)));
}

template <int kType>
void rotate_halves(const uint8_t* x, uint8_t* out, const uint8_t* table, int64_t half) {
  using E = Elements<kType>;
  each(half, [&](int64_t i, int n) {
    F low, high;
    rotated<kType>(E::load_n(x, i, n), E::load_n(x, half + i, n), E::load_n(table, i, n),
                   E::load_n(table, half + i, n), low, high);
    E::store_n(out, i, low, n);
    E::store_n(out, half + i, high, n);
  });
}

template <int kType>
void rotate_pairs(const uint8_t* x, uint8_t* out, const uint8_t* table, int64_t half) {
  using E = Elements<kType>;
  alignas(64) float both[2 * kLanes], low_part[kLanes], high_part[kLanes];
  each(half, [&](int64_t i, int n) {
    const int first = static_cast<int>(smaller(kLanes, 2 * n));
    store(both, E::load_n(x, 2 * i, first));
    store(both + kLanes, 2 * n > kLanes ? E::load_n(x, 2 * i + kLanes, 2 * n - kLanes)
                                        : set1(0.f));
    for (int j = 0; j < kLanes; ++j) {
      low_part[j] = both[2 * j];
      high_part[j] = both[2 * j + 1];
    }
    F low, high;
    rotated<kType>(load(low_part), load(high_part), E::load_n(table, i, n),
                   E::load_n(table, half + i, n), low, high);
    store(low_part, low);
    store(high_part, high);
    for (int j = 0; j < kLanes; ++j) {
      both[2 * j] = low_part[j];
      both[2 * j + 1] = high_part[j];
    }
    E::store_n(out, 2 * i, load(both), first);
    if (2 * n > kLanes) E::store_n(out, 2 * i + kLanes, load(both + kLanes), 2 * n - kLanes);
  });
}

template <int kType>
void rotate(const StepOp& op, const StepInputs& in, int64_t row) {
  using E = Elements<kType>;
  const auto* const table = static_cast<const uint8_t*>(op.weight) +
                            in.positions[row] * op.weight_stride * E::kBytes;
  for (int64_t head = 0; head < op.heads; ++head) {
    const uint8_t* const x = E::at(op.x, row, head * op.size);
    uint8_t* const out = E::at(op.out, row, head * op.size);
    if (op.mode == kRotateHalves) {
      rotate_halves<kType>(x, out, table, op.out_size / 2);
    } else {
      rotate_pairs<kType>(x, out, table, op.out_size / 2);
    }
  }
}

// erf by a rational approximation (Abramowitz and Stegun 7.1.26); absolute error 1.5e-7.
VLLM_INLINE F erf(F x) {
  const F zero = set1(0.f);
  const F size = max(x, sub(zero, x));
  const F t = div(set1(1.f), fma(set1(0.3275911f), size, set1(1.f)));
  F p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F tail = mul(mul(p, t), exp(sub(zero, mul(size, size))));
  const F value = sub(set1(1.f), tail);
  const F sign = div(x, max(size, set1(1e-30f)));
  return mul(value, sign);
}

VLLM_INLINE F activation(int32_t mode, F x) {
  const F one = set1(1.f);
  if (mode == kGateSilu) {
    const F clipped = max(set1(-87.f), min(set1(87.f), x));
    return div(x, add(one, exp(sub(set1(0.f), clipped))));
  }
  const F half = mul(set1(0.5f), x);
  if (mode == kGateGelu) {
    return mul(half, add(one, erf(mul(x, set1(0.70710678118654752f)))));
  }
  const F cube = mul(mul(x, x), x);
  const F inner = mul(set1(0.79788456080286536f), fma(set1(0.044715f), cube, x));
  return mul(half, add(one, tanh(inner)));
}

template <int kType>
void gate(const StepOp& op, int64_t row) {
  using E = Elements<kType>;
  const uint8_t* const x = E::at(op.x, row, 0);
  uint8_t* const out = E::at(op.out, row, 0);
  each(op.size, [&](int64_t i, int n) {
    const F gated = E::rounded(activation(op.mode, E::load_n(x, i, n)));
    E::store_n(out, i, mul(gated, E::load_n(x, op.size + i, n)), n);
  });
}

template <int kType>
void add_rows(const StepOp& op, int64_t row) {
  using E = Elements<kType>;
  const uint8_t* const x = E::at(op.x, row, 0);
  const uint8_t* const y = E::at(op.y, row, 0);
  uint8_t* const out = E::at(op.out, row, 0);
  each(op.size, [&](int64_t i, int n) {
    E::store_n(out, i, add(E::load_n(x, i, n), E::load_n(y, i, n)), n);
  });
}

template <int kType>
void soft_cap(const StepOp& op, int64_t row) {
  using E = Elements<kType>;
  const uint8_t* const x = E::at(op.x, row, 0);
  uint8_t* const out = E::at(op.out, row, 0);
  each(op.size, [&](int64_t i, int n) {
    const F part = E::rounded(div(E::load_n(x, i, n), set1(op.scale)));
    E::store_n(out, i, mul(E::rounded(tanh(part)), set1(op.scale)), n);
  });
}

template <int kType>
void pick(const StepOp& op, const StepInputs& in, int64_t row) {
  using E = Elements<kType>;
  const int64_t from = op.mode == kPicked ? row : in.wanted[row];
  const uint8_t* const x = E::at(op.x, from, 0);
  uint8_t* const out = E::at(op.out, row, 0);
  each(op.size, [&](int64_t i, int n) { E::store_n(out, i, E::load_n(x, i, n), n); });
}

template <int kType>
void run_row(const StepOp& op, const StepInputs& in, int64_t row) {
  switch (op.kind) {
    case kStepEmbed: return embed<kType>(op, in, row);
    case kStepNorm:
      for (int64_t head = 0; head < op.heads; ++head) {
        norm_head<kType>(op, row, head * op.size);
      }
      return;
    case kStepRotate: return rotate<kType>(op, in, row);
    case kStepGate: return gate<kType>(op, row);
    case kStepAdd: return add_rows<kType>(op, row);
    case kStepSoftCap: return soft_cap<kType>(op, row);
    case kStepPick: return pick<kType>(op, in, row);
    default: return;
  }
}

}  // namespace

void step_rows(const StepOp& op, const StepInputs& in, int64_t begin, int64_t end) {
  with_type(op.dtype, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) run_row<type.kValue>(op, in, row);
  });
}

}  // namespace vllm_cpu::VLLM_ISA
