// The ops of torch.ops.flash_qla. An output that was not asked for (h, final_state, dh0) is an empty tensor of shape
// [0]: TorchScript, export and functionalization all represent that, and not all of them an optional return.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(flash_qla, m) {
  m.def(
      "chunk_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
      "Tensor? initial_state=None, bool output_final_state=False, bool use_qk_l2norm_in_kernel=False, "
      "Tensor? cu_seqlens=None, bool state_v_first=False, bool auto_cp=True, ScalarType? state_dtype=None) "
      "-> (Tensor o, Tensor final_state)");
  m.def(
      "chunk_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float? scale=None, "
      "Tensor? initial_state=None, Tensor? cu_seqlens=None, bool output_final_state=True, bool output_h=False, "
      "bool auto_cp=True, bool state_v_first=False, bool use_qk_l2norm_in_kernel=False, "
      "ScalarType? state_dtype=None) -> (Tensor g_cumsum, Tensor A, Tensor o, Tensor h, Tensor final_state)");
  m.def(
      "chunk_gated_delta_rule_bwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor A, Tensor do, "
      "Tensor? dht=None, float? scale=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
      "bool state_v_first=False, bool auto_cp=True, bool use_qk_l2norm_in_kernel=False) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor db, Tensor dg, Tensor dh0)");
}
