// The checks of FLASH_QLA_CHECK=1 besides offsets and tables: the numbers in a call's tensors, and in its results.
// docs/checks.md lists them.
#pragma once

#include "call.h"
#include "decode.h"
#include "passes.h"
#include "prefill.h"

namespace flash_qla {

// Whether FLASH_QLA_CHECK=1 is in the environment: calls check the contents of their tensors, and synchronize on a GPU.
bool contents_are_checked();

// Each throws std::runtime_error with the element, what was expected and what came. They check tokens of sequences that
// have a slot, and states of a pool that are read. They do nothing unless contents_are_checked. That of a
// BufferedDecodeCall checks its replay buffers alone.
void check_contents(const Call& call);
void check_contents(const BackwardCall& call);
void check_contents(const PrefillCall& call);
void check_contents(const DecodeCall& call);
void check_contents(const BufferedDecodeCall& call);

// Each throws, like check_contents, for results that are not finite: of the tokens first, then states. The call has
// run, so the states in its pool have changed. `o`: the op's result.
void check_results(const Call& call, const ForwardOutputs& out);
void check_results(const BackwardCall& call, const BackwardOutputs& out);
void check_results(const PrefillCall& call, const Tensor& o);
void check_results(const DecodeCall& call, const Tensor& o);

}  // namespace flash_qla
