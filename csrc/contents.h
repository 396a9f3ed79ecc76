// The checks of FLASH_QLA_CHECK=1 besides offsets and tables: the numbers in a call's tensors. docs/checks.md lists
// them.
#pragma once

#include "call.h"
#include "decode.h"
#include "prefill.h"

namespace flash_qla {

// Whether FLASH_QLA_CHECK=1 is in the environment: calls check the contents of their tensors, and synchronize on a GPU.
bool contents_are_checked();

// Each throws std::runtime_error with the element, what was expected and what came. They check tokens of sequences that
// have a slot, and states of a pool that are read. They do nothing unless contents_are_checked.
void check_contents(const Call& call);
void check_contents(const BackwardCall& call);
void check_contents(const PrefillCall& call);
void check_contents(const DecodeCall& call);

}  // namespace flash_qla
