// Replaces the host's header: preamble.h has the parts that device code uses.
