// Keys as indices of centroids with a norm, in rotated space, or as e4m3; values as
// whole codes with a step and a smallest value: see turboquant.py.
#include "../kv_formats.h"
#include "attention_tile.h"
#include "packed.h"
#include "pairs.h"
#include "rotation.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

constexpr float kNormEpsilon = 1e-8f;
constexpr float kCodebookEpsilon = 1e-16f;
constexpr float kMinStep = 1e-8f;
constexpr float kKeyLimit = 0x1p58f;  // squares of a head stay finite
constexpr float kHalfMax = 65504.f;

template <class Format>
float value_step(const uint8_t* cell, const Format& f) {
  return half_at(cell + f.v_scale_offset());
}
template <class Format>
float value_zero(const uint8_t* cell, const Format& f) {
  return half_at(cell + f.v_zero_offset());
}

#if defined(__AVX512BF16__)
// value = code * step + smallest, with the codes' middle at 0
template <class Format, int kBits>
struct ValueNumbers {
  static_assert(Format{}.v_scale_unit() == 2 && Format{}.v_codes_interleave() == 2);
  int64_t step_at;
  int64_t zero_at;
  explicit ValueNumbers(const Format& f)
      : step_at(kTurns * f.v_scale_region()), zero_at(kTurns * f.v_zero_region()) {}

  void load(const uint8_t* tile, uint32_t keep, int v, StateNumbers& n) const {
    const F step = turns_of_halves(tile + step_at, keep);
    const F zero = turns_of_halves(tile + zero_at, keep);
    store(n.value_scale + v * kLanes, step);
    store(n.value_bias + v * kLanes, fma(step, set1(Centred<kBits>::kCentre), zero));
  }
};

template <class Format, int kBits>
struct Fp8Keys : PairCells<Bytes<E4M3Bytes>, Nibbles<kBits>> {
  using Base = PairCells<Bytes<E4M3Bytes>, Nibbles<kBits>>;
  static constexpr Centred<kBits> kCodes{};
  static constexpr bool kValueScales = true;
  static constexpr bool kValueBiases = true;

  explicit Fp8Keys(const AttentionArgs& a)
      : Fp8Keys(a, Format{a.query.size, a.out.size}) {}
  Fp8Keys(const AttentionArgs& a, const Format& f)
      : Base(a, f.state_bytes(), f.v_codes_region(), f.v_codes_bytes(),
             {{}, Nibbles<kBits>(kCodes.values, true)}),
        numbers(f) {}

  void load_numbers(const uint8_t* tile, const uint8_t*, uint32_t keep, int v,
                    StateNumbers& n) const {
    numbers.load(tile, keep, v, n);
  }

  ValueNumbers<Format, kBits> numbers;
};

template <int kBits>
struct Codebook {
  uint16_t values[1 << kBits];
  explicit Codebook(const float* centroids) {
    for (int i = 0; i < 1 << kBits; ++i) values[i] = bfloat16_of(centroids[i]);
  }
};

template <class Format, int kKeyBits, int kValueBits>
struct CentroidKeys : PairCells<Nibbles<kKeyBits>, Nibbles<kValueBits>> {
  using Base = PairCells<Nibbles<kKeyBits>, Nibbles<kValueBits>>;
  static constexpr Centred<kValueBits> kCodes{};
  static constexpr bool kKeyScales = true;
  static constexpr bool kKeySquares = true;
  static constexpr bool kValueScales = true;
  static constexpr bool kValueBiases = true;

  explicit CentroidKeys(const AttentionArgs& a)
      : CentroidKeys(a, Format{a.query.size, a.out.size}) {}
  CentroidKeys(const AttentionArgs& a, const Format& f)
      : Base(a, f.state_bytes(), f.v_codes_region(), f.v_codes_bytes(),
             {Nibbles<kKeyBits>(Codebook<kKeyBits>(a.key_table).values, false),
              Nibbles<kValueBits>(kCodes.values, true)}),
        numbers(f),
        norm_at(kTurns * f.k_norm_region()) {}

  void load_numbers(const uint8_t* tile, const uint8_t*, uint32_t keep, int v,
                    StateNumbers& n) const {
    const F square = add(load(n.key_square + v * kLanes), set1(kCodebookEpsilon));
    const F norm = turns_of_halves(tile + norm_at, keep);
    store(n.key_scale + v * kLanes, div(norm, _mm512_sqrt_ps(square)));
    numbers.load(tile, keep, v, n);
  }

  void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) const {
    alignas(64) float row[kMaxHead];
    load_floats(row, query, from, 2 * units);
    rotate(row, query.size);
    pair_up<Base::kKeyExpand>(to, row, units);
  }

  ValueNumbers<Format, kValueBits> numbers;
  int64_t norm_at;
};
#endif

template <class Format, class Tiles, int kKeyBits, int kValueBits>
struct Quantised {
  static PageRun page_run(const PackedArgs& a, const Pages& pages, int) {
    return cell_run(pages, Format{a.size, a.size_v}.state_bytes());
  }

  static void decode_key(const PackedArgs& a, const Format& f, const uint8_t* cell,
                         float* key) {
    if constexpr (kKeyBits == 8) {
      unpack_bytes<e4m3>(key, cell + f.k_codes_offset(), a.size);
    } else {
      float squares[kMaxHead];
      unpack_codes<kKeyBits>(key, cell + f.k_codes_offset(), a.size);
      for (int i = 0; i < a.size; ++i) {
        key[i] = a.key_table[static_cast<int>(key[i])];
        squares[i] = key[i] * key[i];
      }
      const float length =
          __builtin_sqrtf(tree_sum(squares, a.size) + kCodebookEpsilon);
      scale_by(key, a.size, half_at(cell + f.k_norm_offset()) / length);
    }
  }
  static void decode(const PackedArgs& a, const State& state, float* key, float* value) {
    const Format f{a.size, a.size_v};
    decode_key(a, f, state.cell, key);
    unpack_codes<kValueBits>(value, state.cell + f.v_codes_offset(), a.size_v);
    const F step = set1(value_step(state.cell, f));
    const F zero = set1(value_zero(state.cell, f));
    for (int i = 0; i < a.size_v; i += kLanes) {
      store(value + i, add(mul(load(value + i), step), zero));
    }
  }

  static void encode_key(const PackedArgs& a, const Format& f, uint8_t* cell,
                         float* x) {
    make_finite(x, a.size, kKeyLimit);
    uint8_t* const codes = cell + f.k_codes_offset();
    if constexpr (kKeyBits == 8) {
      for (int i = 0; i < a.size; ++i) codes[i] = static_cast<uint8_t>(e4m3_code(x[i]));
    } else {
      float squares[kMaxHead];
      for (int i = 0; i < a.size; ++i) squares[i] = x[i] * x[i];
      const float norm = __builtin_sqrtf(tree_sum(squares, a.size));
      const float length = norm + kNormEpsilon;
      for (int i = 0; i < a.size; i += kLanes) {
        store(x + i, div(load(x + i), set1(length)));
      }
      rotate(x, a.size);
      alignas(64) uint8_t index[kMaxHead];
      for (int i = 0; i < a.size; i += kLanes) {
        const Floats value = (Floats)load(x + i);
        Ints reached{};
        for (int bound = 0; bound < (1 << kKeyBits) - 1; ++bound) {
          reached -= value >= a.key_table[bound];
        }
        store_bytes(index + i, reached, a.size - i);
      }
      pack_codes<kKeyBits>(codes, index, a.size);
      put_half(cell + f.k_norm_offset(), norm);
    }
  }
  static void encode_value(const PackedArgs& a, const Format& f, uint8_t* cell,
                           float* x) {
    constexpr float kTop = (1 << kValueBits) - 1;
    make_finite(x, a.size_v, kHalfMax);
    float low;
    float high;
    range_of(x, a.size_v, x[0], low, high);
    const float wanted = (high - low) / kTop;
    const float step = wanted > kMinStep ? wanted : kMinStep;
    alignas(64) uint8_t codes[kMaxHead];
    for (int i = 0; i < a.size_v; i += kLanes) {
      const F code = add(div(sub(load(x + i), set1(low)), set1(step)), set1(0.5f));
      store_bytes(codes + i, whole_of(clipped(code, 0.f, kTop)), a.size_v - i);
    }
    pack_codes<kValueBits>(cell + f.v_codes_offset(), codes, a.size_v);
    put_half(cell + f.v_scale_offset(), step);
    put_half(cell + f.v_zero_offset(), low);
  }
  static void encode(const PackedArgs& a, const MutableState& state, float* key,
                     float* value) {
    const Format f{a.size, a.size_v};
    encode_key(a, f, state.cell, key);
    encode_value(a, f, state.cell, value);
    const int64_t end = f.v_zero_offset() + f.v_zero_bytes();
    memset(state.cell + end, 0, f.state_bytes() - end);
  }

  static TurnsOf turns(const PackedArgs& a) {
    const Tiles f{a.size, a.size_v};
    TurnsOf all{0, {}};
    all.fields[all.count++] = VLLM_TURNS(f, k_codes, 0);
    if constexpr (kKeyBits != 8) all.fields[all.count++] = VLLM_TURNS(f, k_norm, 0);
    all.fields[all.count++] = VLLM_TURNS(f, v_codes, 0);
    all.fields[all.count++] = VLLM_TURNS(f, v_scale, 0);
    all.fields[all.count++] = VLLM_TURNS(f, v_zero, 0);
    return all;
  }

  static constexpr PackedFormat format(const AttentionKernel* pairs) {
    constexpr Rotation kRotation = kKeyBits == 8 ? Rotation::kNone : Rotation::kKeysOnly;
    return {kRotation, page_run, 1, decode, encode, encode_cell<encode>, turns, pairs};
  }
};

}  // namespace

const PackedFormat* packed_turboquant(int32_t cell_format) {
  using K8V4 = kv_formats::turboquant_k8v4;
  using K4V4 = kv_formats::turboquant_4bit_nc;
  using K3V4 = kv_formats::turboquant_k3v4_nc;
  using K3V3 = kv_formats::turboquant_3bit_nc;
  using K8V4Tiles = kv_formats::turboquant_k8v4_tile16;
  using K4V4Tiles = kv_formats::turboquant_4bit_nc_tile16;
  using K3V4Tiles = kv_formats::turboquant_k3v4_nc_tile16;
  using K3V3Tiles = kv_formats::turboquant_3bit_nc_tile16;
  static constexpr PackedFormat k8v4 =
      Quantised<K8V4, K8V4Tiles, 8, 4>::format(VLLM_PAIRS(Fp8Keys<K8V4Tiles, 4>));
  static constexpr PackedFormat k4v4 = Quantised<K4V4, K4V4Tiles, 4, 4>::format(
      VLLM_PAIRS(CentroidKeys<K4V4Tiles, 4, 4>));
  static constexpr PackedFormat k3v4 = Quantised<K3V4, K3V4Tiles, 3, 4>::format(
      VLLM_PAIRS(CentroidKeys<K3V4Tiles, 3, 4>));
  static constexpr PackedFormat k3v3 = Quantised<K3V3, K3V3Tiles, 3, 3>::format(
      VLLM_PAIRS(CentroidKeys<K3V3Tiles, 3, 3>));
  switch (cell_format) {
    case kCellsTurboQuantK8V4: return &k8v4;
    case kCellsTurboQuant4Bit: return &k4v4;
    case kCellsTurboQuantK3V4: return &k3v4;
    case kCellsTurboQuant3Bit: return &k3v3;
    default: return nullptr;
  }
}

}  // namespace vllm_cpu::VLLM_ISA
