// The host's header is empty here: preamble.h replaces it.
