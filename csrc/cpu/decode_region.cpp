// decode_gated_delta_net on the CPU: its parts, one after the other.
#include "decode_region.h"

namespace flash_qla {

Tensor decode_region_cpu(const DecodeRegion& region) {
  return region.run_parts<convolve_cpu, decode_cpu, gated_rms_norm_cpu>();
}

}  // namespace flash_qla
