// The work of decoding on each sequence, from tables whose contents have been checked.
#pragma once

#include <cstdint>
#include <vector>

#include "decode.h"
#include "layout.h"

namespace flash_qla::cpu {

// kNoState: no slot, so nothing is read or written.
struct DecodePlan {
  int64_t begin, end;            // rows of q, k, v
  int64_t slot;                  // slot of the first state
  std::vector<int64_t> parents;  // parent of each token; -1: the first state
  std::vector<int64_t> slots;    // slot of the state after each token
  int64_t row;                   // row of intermediate_states
};

// Throws if a table has an index out of range, or names a slot that is written twice. The tables are on the CPU.
std::vector<DecodePlan> plan_decoding(const DecodeCall& call);

DecodeCall with_tables_on_cpu(DecodeCall call);

}  // namespace flash_qla::cpu
