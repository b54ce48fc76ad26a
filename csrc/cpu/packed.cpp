// Packed formats by number: attention in bf16 where a format has it, else over rows
// decoded to float32; and the write of states.
#include "packed.h"

#include "attention_tile.h"
#include "kernels.h"
#include "rotation.h"

namespace vllm_cpu::VLLM_ISA {
namespace {

constexpr int64_t kParallelElems = 1 << 14;  // below this, waking threads costs more
constexpr int kMaxRuns = 4;
constexpr int kMaxRecord = 2 * kMaxHead + 64;  // bytes of 8-bit codes and their scales

const PackedFormat* packed_format(int32_t cell_format) {
  const PackedFormat* found = packed_fp8(cell_format);
  if (found == nullptr) found = packed_per_token_head(cell_format);
  if (found == nullptr) found = packed_nvfp4(cell_format);
  return found == nullptr ? packed_turboquant(cell_format) : found;
}

// Float32 rows of K then V, made from states once per tile.
struct DecodedRows : PlainCells<Float32Units> {
  static constexpr bool kDecoded = true;
  static constexpr bool kPlaced = true;
  static constexpr bool kFinishes = true;
  static constexpr int kFewRows = 1;
  static constexpr int kRegisterBytes = kLanes;  // of a cell, about
  static constexpr int kValueGroupBytes = kLanes;

  explicit DecodedRows(const AttentionArgs& a)
      : PlainCells(a, 0), args(packed_args(a)), format(*packed_format(a.cell_format)) {
    for (int i = 0; i < format.num_runs; ++i) {
      runs[i] = format.page_run(args, a.pages, i);
    }
    value_floats = round_up(a.query.size, 16);
    row_bytes = decoded_bytes(a);
  }

  static int64_t decoded_bytes(const AttentionArgs& a) {
    return (round_up(a.query.size, 16) + round_up(a.out.size, 16)) * 4;
  }
  static int64_t finish_floats(const AttentionArgs& a) {
    return round_up(a.out.size, 16);
  }
  int num_runs() const { return format.num_runs; }
  const PageRun& page_run(int i) const { return runs[i]; }

  void decode(const State& state, uint8_t* row) const {
    float* const key = reinterpret_cast<float*>(row);
    format.decode(args, state, key, key + value_floats);
  }

  U load_key(const uint8_t* row, int elem, int count) const {
    return as_units(load_f32(reinterpret_cast<const float*>(row) + elem, count));
  }
  void load_values(const uint8_t* const* rows, int elem, int count,
                   U (&r)[1][1]) const {
    r[0][0] = load_key(rows[0] + value_floats * 4, elem, count);
  }

  void load_query(uint32_t* to, const Rows& query, int64_t from, int64_t units) const {
    Units::load_query(to, query, from, units);
    float* const x = reinterpret_cast<float*>(to);
    if (format.rotation == Rotation::kSigned) {
      rotate_query_at_random(x, args.size, args.key_table);
    } else if (format.rotation == Rotation::kKeysOnly) {
      rotate(x, args.size);
    }
  }

  void finish(const float* acc, float, float* to) const {
    memcpy(to, acc, static_cast<size_t>(args.size_v) * 4);
    if (format.rotation == Rotation::kSigned) {
      rotate_back(to, args.size_v, args.value_table);
    }
  }

  PackedArgs args;
  const PackedFormat& format;
  PageRun runs[kMaxRuns];
  int64_t value_floats;
  int64_t row_bytes;
};

template <int kDType>
void load_floats(float* to, const Rows& rows, int64_t token, int64_t head) {
  const int64_t from = token * rows.token_stride + head * rows.head_stride;
  const uint8_t* const data =
      static_cast<const uint8_t*>(rows.data) + from * dtype_bytes(kDType);
  for (int i = 0; i < rows.size; i += kLanes) {
    store(to + i, load_as_float<kDType>(data + i * dtype_bytes(kDType), rows.size - i));
  }
}

template <int kDType>
int32_t store_as(const StoreArgs& a, const PackedFormat& format) {
  const Pages& pages = a.pages;
  const PackedArgs args{a.key.size,    a.value.size, a.k_scale,       a.v_scale,
                        a.key_table,   a.value_table, kDType,         pages.num_heads,
                        pages.block_size};
  const bool tiled = (a.cell_format & kTiled) != 0;
  const PageRun run = tiled ? cell_run(pages, 0) : format.page_run(args, pages, 0);
  const TurnsOf turns = format.turns(args);
  const int64_t num_slots = pages.num_blocks * pages.block_size;
  const int64_t elems = static_cast<int64_t>(a.num_tokens) * pages.num_heads *
                        (a.key.size + a.value.size);
#pragma omp parallel for schedule(static) if (elems > kParallelElems)
  for (int32_t token = 0; token < a.num_tokens; ++token) {
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0 || slot >= num_slots) continue;
    uint8_t* const page = pages.data + slot / pages.block_size * pages.block_stride;
    const int64_t in_block = slot % pages.block_size;
    for (int32_t head = 0; head < pages.num_heads; ++head) {
      alignas(64) float key[kMaxHead + kLanes];
      alignas(64) float value[kMaxHead + kLanes];
      load_floats<kDType>(key, a.key, token, head);
      load_floats<kDType>(value, a.value, token, head);
      if (tiled) {
        alignas(64) uint8_t record[kMaxRecord];
        format.encode_record(args, record, key, value);
        deal_record(pages, page, head, in_block, record, turns);
        continue;
      }
      uint8_t* const cell =
          page + run.base + head * run.head_stride + in_block * run.state_stride;
      format.encode(args, {cell, page, head * static_cast<int64_t>(pages.block_size) +
                                           in_block},
                    key, value);
    }
  }
  return kOk;
}

}  // namespace

const AttentionKernel* packed_attention(int32_t cell_format, int32_t query_dtype) {
  static constexpr AttentionKernel decoded = TileAttention<DecodedRows>::kernel();
  const bool tiled = (cell_format & kTiled) != 0;
  const PackedFormat* const format = packed_format(cell_format & ~kTiled);
  if (format == nullptr) return nullptr;
  if (tiled) return query_dtype == kBFloat16 ? format->pairs : nullptr;
  return &decoded;
}

int32_t store_packed(const StoreArgs& a) {
  const PackedFormat* const format = packed_format(a.cell_format & ~kTiled);
  if (format == nullptr || a.key.size > kMaxHead || a.value.size > kMaxHead) {
    return kUnsupported;
  }
  switch (a.key.dtype) {
    case kFloat32: return store_as<kFloat32>(a, *format);
    case kFloat16: return store_as<kFloat16>(a, *format);
    default: return store_as<kBFloat16>(a, *format);
  }
}

}  // namespace vllm_cpu::VLLM_ISA
