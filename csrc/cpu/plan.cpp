#include "plan.h"

#include <algorithm>

namespace vllm_cpu {
namespace {

constexpr int kItemsPerThread = 4;

KeyRange tile_keys(const AttentionArgs& a, int32_t request, int64_t first_row,
                   int64_t last_row) {
  const int64_t seq_len = a.seq_lens[request];
  const int64_t num_new = a.query_start_loc[request + 1] - a.query_start_loc[request];
  const int64_t group = a.num_query_heads / a.pages.num_heads;
  const int64_t past = seq_len - num_new;
  return {key_range(a, seq_len, past + first_row / group).begin,
          key_range(a, seq_len, past + last_row / group).end};
}

Status check_request(const AttentionArgs& a, int32_t request) {
  const int64_t begin = a.query_start_loc[request];
  const int64_t end = a.query_start_loc[request + 1];
  if (begin < 0 || end < begin || end > a.num_tokens) return kBadQueryStartLoc;
  if (begin == end) return kOk;
  const int64_t capacity =
      static_cast<int64_t>(a.block_table_width) * a.pages.block_size;
  if (a.seq_lens[request] < 0 || a.seq_lens[request] > capacity) return kBadSeqLen;
  const int64_t group = a.num_query_heads / a.pages.num_heads;
  const KeyRange keys = tile_keys(a, request, 0, (end - begin) * group - 1);
  if (keys.begin >= keys.end) return kOk;
  const int32_t* const table = a.block_table + request * a.block_table_stride;
  const int64_t last_block = (keys.end - 1) / a.pages.block_size;
  for (int64_t i = keys.begin / a.pages.block_size; i <= last_block; ++i) {
    if (table[i] < 0 || table[i] >= a.pages.num_blocks) return kBadBlockId;
  }
  return kOk;
}

}  // namespace

Checked check(const AttentionArgs& args) {
  for (int32_t request = 0; request < args.num_requests; ++request) {
    const Status status = check_request(args, request);
    if (status != kOk) return {status, request};
  }
  return {};
}

// Ten elements are unpacked in a cycle, and forty multiplied, for each tile of rows.
int64_t estimated_cycles(const AttentionArgs& a) {
  const int64_t group = a.num_query_heads / a.pages.num_heads;
  int64_t products = 0;
  for (int32_t request = 0; request < a.num_requests; ++request) {
    const int64_t rows =
        (a.query_start_loc[request + 1] - a.query_start_loc[request]) * group;
    if (rows == 0) continue;
    const KeyRange keys = tile_keys(a, request, 0, rows - 1);
    const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
    products += (keys.end - keys.begin) * (4 * tiles + rows);
  }
  return products * a.pages.num_heads * (a.query.size + a.out.size) / 40;
}

Plan make_plan(const AttentionArgs& a, const AttentionKernel& kernel, int num_threads) {
  Plan plan;
  std::vector<WorkItem>& tiles = plan.items;
  const int32_t group = a.num_query_heads / a.pages.num_heads;
  for (int32_t request = 0; request < a.num_requests; ++request) {
    const int32_t num_rows =
        (a.query_start_loc[request + 1] - a.query_start_loc[request]) * group;
    // The last rows see the most keys: they start first.
    for (int32_t end = num_rows; end > 0; end = (end - 1) / kMaxRows * kMaxRows) {
      const int32_t begin = (end - 1) / kMaxRows * kMaxRows;
      const KeyRange keys = tile_keys(a, request, begin, end - 1);
      const auto first = static_cast<int32_t>(keys.begin / kChunkStates);
      const auto last =
          static_cast<int32_t>((keys.end + kChunkStates - 1) / kChunkStates);
      for (int32_t head = 0; head < a.pages.num_heads; ++head) {
        tiles.push_back(
            {request, head, begin, end, keys, first, std::max(first, last), nullptr});
      }
      plan.num_chunks += static_cast<int64_t>(a.pages.num_heads) * (last - first);
    }
  }
  if (num_threads <= 1) return plan;

  const int64_t share = num_threads * kItemsPerThread;
  const auto most = static_cast<int32_t>(
      std::max<int64_t>(1, (plan.num_chunks + share - 1) / share));
  const auto too_long = [most](const WorkItem& t) {
    return t.chunk_end - t.chunk_begin > most;
  };
  int64_t floats = 0;
  for (const WorkItem& tile : tiles) {
    if (!too_long(tile)) continue;
    floats += kernel.partial_floats(a, tile.row_end - tile.row_begin) *
              (tile.chunk_end - tile.chunk_begin);
  }
  if (floats == 0) return plan;

  plan.partials.resize(floats);
  float* next = plan.partials.data();
  std::vector<WorkItem> pieces;
  for (const WorkItem& tile : tiles) {
    if (!too_long(tile)) {
      pieces.push_back(tile);
      continue;
    }
    WorkItem whole = tile;
    whole.partials = next;
    plan.merges.push_back(whole);
    const int64_t chunk_floats =
        kernel.partial_floats(a, tile.row_end - tile.row_begin);
    for (int32_t begin = tile.chunk_begin; begin < tile.chunk_end; begin += most) {
      WorkItem piece = tile;
      piece.chunk_begin = begin;
      piece.chunk_end = std::min(begin + most, tile.chunk_end);
      piece.partials = next;
      next += chunk_floats * (piece.chunk_end - begin);
      pieces.push_back(piece);
    }
  }
  plan.items = std::move(pieces);
  return plan;
}

}  // namespace vllm_cpu
