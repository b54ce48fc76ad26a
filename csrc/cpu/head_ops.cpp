// Operations of a step on the heads of rows, row by row: copies of heads that lie apart,
// Hadamard rotations, scales, sums, and rows as float32.
#include <string.h>

#include "kernels.h"
#include "rotation.h"
#include "step.h"

namespace vllm_cpu::VLLM_ISA {

namespace {

constexpr int kMostTurned = 1024;  // elements of a block

template <int kType>
uint8_t* at(const StepRows& rows, int64_t row, int64_t element) {
  return static_cast<uint8_t*>(rows.data) +
         (row * rows.stride + element) * dtype_bytes(kType);
}

void copy_heads(const StepOp& op, int64_t row) {
  const CopyArgs& a = *static_cast<const CopyArgs*>(op.args);
  const int64_t bytes = dtype_bytes(a.out.dtype);
  auto* const out = static_cast<uint8_t*>(a.out.data) + row * a.out.token_stride * bytes;
  const auto* const x =
      static_cast<const uint8_t*>(a.x.data) + row * a.x.token_stride * bytes;
  for (int64_t head = 0; head < op.heads; ++head) {
    memcpy(out + head * a.out.head_stride * bytes, x + head * a.x.head_stride * bytes,
           a.out.size * bytes);
  }
}

// Reads a block before it is written: x and out may be the same.
template <int kType>
void turn(const StepOp& op, int64_t row) {
  const auto* const signs = static_cast<const float*>(op.weight);
  const int block = op.out_size;
  const int64_t elements = static_cast<int64_t>(op.heads) * op.size;
  alignas(64) float x[kMostTurned];
  for (int64_t first = 0; first < elements; first += block) {
    for (int i = 0; i < block; i += kLanes) {
      const int count = static_cast<int>(smaller(kLanes, block - i));
      const F value = load_as_float<kType>(at<kType>(op.x, row, first + i), count);
      store_from_float<kFloat32>(x + i, value, count);
    }
    if (op.mode == kSignsFirst) {
      for (int i = 0; i < block; ++i) x[i] *= signs[i];
    }
    hadamard(x, block);
    if (op.mode == kSignsLast) {
      for (int i = 0; i < block; ++i) x[i] *= signs[i];
    }
    for (int i = 0; i < block; i += kLanes) {
      const int count = static_cast<int>(smaller(kLanes, block - i));
      const F value = mul(load_as_float<kFloat32>(x + i, count), set1(op.scale));
      store_from_float<kType>(at<kType>(op.out, row, first + i), value, count);
    }
  }
}

template <int kType>
void widen(const StepOp& op, int64_t row) {
  for (int64_t i = 0; i < op.size; i += kLanes) {
    const int count = static_cast<int>(smaller(kLanes, op.size - i));
    const F x = load_as_float<kType>(at<kType>(op.x, row, i), count);
    store_from_float<kFloat32>(at<kFloat32>(op.out, row, i), x, count);
  }
}

// out = x * factor, rounded once.
template <int kType>
void scale(uint8_t* out, const uint8_t* x, int64_t size, float factor) {
  constexpr int kBytes = dtype_bytes(kType);
  for (int64_t i = 0; i < size; i += kLanes) {
    const int count = static_cast<int>(smaller(kLanes, size - i));
    const F value = load_as_float<kType>(x + i * kBytes, count);
    store_from_float<kType>(out + i * kBytes, mul(value, set1(factor)), count);
  }
}

template <int kType>
void spread(const StepOp& op, int64_t row) {
  for (int64_t head = 0; head < op.heads; ++head) {
    float factor;
    memcpy(&factor, at<kFloat32>(op.y, row, head), sizeof factor);
    uint8_t narrow[4];
    store_from_float<kType>(narrow, set1(factor), 1);  // rounded, as x is
    alignas(64) float lanes[kLanes];
    store(lanes, load_as_float<kType>(narrow, 1));
    scale<kType>(at<kType>(op.out, row, head * op.size), at<kType>(op.x, row, 0), op.size,
                 lanes[0]);
  }
}

template <int kType>
void sum_heads(const StepOp& op, int64_t row) {
  for (int64_t i = 0; i < op.size; i += kLanes) {
    const int count = static_cast<int>(smaller(kLanes, op.size - i));
    F sum = set1(0.f);
    for (int64_t head = 0; head < op.heads; ++head) {
      sum = add(sum, load_as_float<kType>(at<kType>(op.x, row, head * op.size + i), count));
    }
    store_from_float<kType>(at<kType>(op.out, row, i), sum, count);
  }
}

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

// Lane by lane first. NaN is never the largest.
template <int kType>
int64_t largest(const uint8_t* x, int64_t size) {
  Floats best = (Floats)set1(-__builtin_inff());
  Ints where = {};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const auto value = (Floats)load_as_float<kType>(x + i * dtype_bytes(kType));
    const Ints larger = value > best;
    best = larger ? value : best;
    where = larger ? Ints{} + static_cast<int32_t>(i) : where;
  }
  alignas(64) float rest[kLanes];
  store(rest, load_as_float<kType>(x + whole * dtype_bytes(kType),
                                   static_cast<int>(size - whole)));
  int64_t found = 0;
  float most = -__builtin_inff();
  for (int lane = 0; lane < kLanes && whole > 0; ++lane) {
    const int64_t index = where[lane] + lane;
    if (best[lane] > most || (best[lane] == most && index < found)) {
      most = best[lane];
      found = index;
    }
  }
  for (int64_t i = whole; i < size; ++i) {
    if (!(rest[i - whole] > most)) continue;
    most = rest[i - whole];
    found = i;
  }
  return found;
}

template <int kType>
void run_row(const StepOp& op, const StepInputs& in, int64_t row) {
  switch (op.kind) {
    case kStepCopy: return copy_heads(op, row);
    case kStepHadamard: return turn<kType>(op, row);
    case kStepWiden: return widen<kType>(op, row);
    case kStepScale:
      return scale<kType>(at<kType>(op.out, row, 0), at<kType>(op.x, row, 0),
                          static_cast<int64_t>(op.heads) * op.size,
                          static_cast<const float*>(op.weight)[in.positions[row]]);
    case kStepSpread: return spread<kType>(op, row);
    case kStepSumHeads: return sum_heads<kType>(op, row);
    case kStepLargest:
      static_cast<int64_t*>(op.out.data)[row * op.out.stride] =
          largest<kType>(at<kType>(op.x, row, 0), op.size);
      return;
    default: return;
  }
}

}  // namespace

void head_rows(const StepOp& op, const StepInputs& in, int64_t begin, int64_t end) {
  with_type(op.dtype, [&](auto type) {
    for (int64_t row = begin; row < end; ++row) run_row<type.kValue>(op, in, row);
  });
}

}  // namespace vllm_cpu::VLLM_ISA
