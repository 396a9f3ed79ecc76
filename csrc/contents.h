// What FLASH_QLA_CHECK=1 looks at besides offsets and tables: the numbers in a call's tensors. docs/checks.md lists it.
#pragma once

#include "call.h"
#include "decode.h"
#include "prefill.h"

namespace flash_qla {

// FLASH_QLA_CHECK=1 in the environment: calls look at the contents of their tensors, and on a GPU synchronize.
bool contents_are_checked();

// Each throws std::runtime_error, naming the element, what was expected and what came. Of tokens they look at those
// that a sequence has which has a slot, of a pool at the states that are read. They do nothing unless
// contents_are_checked.
void check_contents(const Call& call);
void check_contents(const BackwardCall& call);
void check_contents(const PrefillCall& call);
void check_contents(const DecodeCall& call);

}  // namespace flash_qla
