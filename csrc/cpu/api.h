// The C ABI of the CPU kernels: plain structs of pointers, strides and counts.
//
// Knows nothing of torch or Python; vllm/v1/attention/ops/cpu_kernels.py mirrors
// these structs field by field and refuses a library whose struct sizes differ.
#pragma once

#include <stdint.h>

#include "../common/cache.h"

namespace vllm_cpu {

using vllm_common::Pages;
using vllm_common::Rows;
using vllm_common::kBFloat16;
using vllm_common::kFloat16;
using vllm_common::kFloat32;

// Internal linkage: units of every instruction set keep copies of their own.
static constexpr int dtype_bytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }

// What one cell of the cache holds. The first three equal their DType.
enum CellFormat : int32_t {
  kCellsFloat32 = 0,
  kCellsFloat16 = 1,
  kCellsBFloat16 = 2,
  kCellsE4M3 = 3,
  kCellsE5M2 = 4,
  kCellsInt8PerTokenHead = 5,
  kCellsFp8PerTokenHead = 6,
  kCellsInt4PerTokenHead = 7,
  kPagesNvFp4 = 8,
  kPagesNvFp4FourOverSix = 9,  // the same pages, written with other scales
  kCellsTurboQuantK8V4 = 10,
  kCellsTurboQuant4Bit = 11,
  kCellsTurboQuantK3V4 = 12,
  kCellsTurboQuant3Bit = 13,

  // Added to one of the above: 16 states take turns ("tile16").
  kTiled = 16,

  // One latent per token, no value of its own.
  kLatentFloat32 = 32,
  kLatentFloat16 = 33,
  kLatentBFloat16 = 34,
  kLatentE4M3 = 35,
  kLatentE5M2 = 36,
  kLatentInt8PerToken = 37,
  kLatentFp8PerToken = 38,
  kLatentInt4PerToken = 39,
  kLatentFp8DsMla = 40,
  kLatentNvFp4DsMla = 41,
};

enum Status : int32_t {
  kOk = 0,
  kUnsupported = 1,        // no kernel for this format and query type
  kOutOfMemory = 2,        // scratch could not be allocated
  kBadQueryStartLoc = 3,   // not ascending, or past the query's rows
  kBadSeqLen = 4,          // negative, or longer than the block table covers
  kBadBlockId = 5,         // outside the cache
  kBadExpert = 6,          // outside the layer
  kBadToken = 7,           // outside the vocabulary
  kBadPosition = 8,        // beyond the table of rotations
};

struct AttentionArgs {
  Rows out;                        // [tokens, query heads, head_size_v]
  Rows query;                      // [tokens, query heads, head_size]
  Pages pages;
  const int32_t* query_start_loc;  // [num_requests + 1]
  const int32_t* seq_lens;         // [num_requests], the new tokens included
  const int32_t* block_table;      // [num_requests, block_table_width]
  const float* sinks;              // [query heads] or null
  int64_t block_table_stride;      // elements
  int32_t block_table_width;
  int32_t num_requests;
  int32_t num_tokens;
  int32_t num_query_heads;
  int32_t cell_format;
  int32_t causal;
  int32_t sliding_window;          // tokens seen, itself included; <= 0: all
  float scale;
  float soft_cap;                  // <= 0: none
  float k_scale;                   // per tensor, of quantised formats
  float v_scale;
  const float* key_table;          // what the format computes for the head size, or null:
  const float* value_table;        // signs of a rotation, centroids
};

struct StoreArgs {
  Pages pages;
  Rows key;                        // [tokens, heads, head_size]
  Rows value;                      // [tokens, heads, head_size_v]
  const int64_t* slot_mapping;     // [num_tokens]; outside the cache: skipped
  const float* signs;              // [key.size] of a rotation of the key, or null
  int32_t num_tokens;
  int32_t cell_format;
  float k_scale;                   // per tensor, of quantised formats
  float v_scale;
  const float* key_table;          // signs of a rotation, midpoints between centroids
  const float* value_table;
};

}  // namespace vllm_cpu
